"""A certificate written out: its table, its dictionary, and which of its layers it names."""

from __future__ import annotations

import math

import pytest
import torch

from wellposed.certification import Certificate, CertifiedLayer
from wellposed.errors import NotLipschitzError

EVERYWHERE = math.inf
BODY = CertifiedLayer(
    "body", "Sequential", 6.0, "product of the parts", "certified", "", EVERYWHERE
)
FIRST = CertifiedLayer(
    "body.a", "Linear", 2.0, "largest singular value", "exact", "assumes this", EVERYWHERE
)
LOST = CertifiedLayer("body.b", "LSTM", math.inf, "none", "uncertified", "no rule", 12.3456)
# Lies beside the body, not in it.
BESIDE = CertifiedLayer("bodyguard", "Linear", 3.0, "", "exact", "only a reason", EVERYWHERE)
LAST = CertifiedLayer("c", "ReLU", 1.0, "largest slope", "exact", "", 0.5)
OPEN = Certificate(
    math.inf,
    (BODY, FIRST, LOST, BESIDE, LAST),
    "uncertified",
    "tok",
    7,
    1,
    "full",
    "all inputs",
    "float32",
)
CLOSED = Certificate(
    1.23456789,
    (BESIDE, LAST),
    "certified",
    2,
    7,
    3,
    "any/full",
    "tokens with |x_i| <= 2",
    "float32",
    2.0,
    ("a note", "another"),
    head=(torch.eye(2), 1.0),
    reason="of no use",
)


def test_the_table() -> None:
    assert OPEN.table().splitlines() == [
        "bound  label        radius  module              form or reason",
        "6      certified    inf     body (Sequential)   product of the parts",
        "2      exact        inf     body.a (Linear)     largest singular value; assumes this",
        "inf    uncertified  12.35   body.b (LSTM)       no rule",
        "3      exact        inf     bodyguard (Linear)  only a reason",
        "1      exact        0.5     c (ReLU)            largest slope",
        (
            "inf    uncertified          total, norm tok     <= 7 tokens, mask full, all inputs,"
            " float32"
        ),
    ]
    assert str(CLOSED) == CLOSED.table()
    assert CLOSED.table().splitlines() == [
        "bound  label      radius  module              form or reason",
        "3      exact      inf     bodyguard (Linear)  only a reason",
        "1      exact      0.5     c (ReLU)            largest slope",
        (
            "1.235  certified          total, norm 2       3 to 7 tokens, mask any/full, tokens"
            " with |x_i| <= 2, float32; a note; another"
        ),
        "of no use",
    ]


def test_the_dictionary_holds_plain_values_alone() -> None:
    found = CLOSED.to_dict()
    layers = found.pop("layers")
    assert found == {
        "total": 1.23456789,
        "label": "certified",
        "norm": 2,
        "tokens": 7,
        "min_tokens": 3,
        "mask": "any/full",
        "domain": "tokens with |x_i| <= 2",
        "ball": 2.0,
        "dtype": "float32",
        "cross_check": "not run",
        "reason": "of no use",
        "weights": "",
        "notes": ["a note", "another"],
    }
    assert [layer["path"] for layer in layers] == ["bodyguard", "c"]
    assert layers[0]["radius"] == "inf"
    assert layers[1] == {
        "path": "c",
        "module": "ReLU",
        "lipschitz": 1.0,
        "form": "largest slope",
        "label": "exact",
        "reason": "",
        "radius": 0.5,
    }
    assert OPEN.to_dict()["total"] == "inf"


def test_losses_are_the_innermost_factors_above_one_and_the_largest_comes_first() -> None:
    assert OPEN.losses() == [LOST, BESIDE, FIRST]
    assert CLOSED.losses() == [BESIDE]


def test_what_has_no_bound_is_named_innermost() -> None:
    outer = CertifiedLayer(
        "body", "Sequential", math.inf, "none", "uncertified", "see body.b", EVERYWHERE
    )
    whole = CertifiedLayer("", "Model", math.inf, "none", "uncertified", "see body", EVERYWHERE)
    certificate = Certificate(
        math.inf, (whole, outer, LOST, BESIDE), "uncertified", "tok", 7, 1, "", "", ""
    )
    assert certificate.uncertified == (LOST,)
    with pytest.raises(NotLipschitzError) as caught:
        certificate.require()
    assert "body.b (LSTM): no rule" in str(caught.value)
    assert "bodyguard" not in str(caught.value)
    alone = Certificate(math.inf, (whole,), "uncertified", "tok", 7, 1, "", "", "")
    with pytest.raises(NotLipschitzError, match=r"\(the module itself\) \(Model\): see body"):
        alone.require()
    overflown = Certificate(math.inf, (BESIDE,), "uncertified", "tok", 7, 1, "", "", "")
    with pytest.raises(NotLipschitzError, match="the product overflows"):
        overflown.require()
    assert CLOSED.require() is CLOSED
