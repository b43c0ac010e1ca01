"""A total of no use says which parts make it so, with numbers that its rows give."""

import json
import math
import re

import pytest
import torch
from tests.support import families
from torch import nn

from wellposed.certification import certify
from wellposed.nn import InvertibleResidual

GELU = 1.128905


def _encoder(**options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        8, 2, 16, batch_first=True, norm_first=True, activation=nn.GELU(), **options
    )  # fmt: skip
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def _bounds(certificate, ending):
    return [layer.lipschitz for layer in certificate.layers if layer.path.endswith(ending)]


def test_without_norms_the_total_is_what_the_rows_give():
    certificate = certify(_encoder(), seq_len=6)
    names = ("self_attn", "linear1", "linear2")
    rows = zip(*(_bounds(certificate, name) for name in names), strict=True)
    expected = math.prod((1 + attention) * (1 + up * GELU * down) for attention, up, down in rows)
    said = r"of no use at (\S+): 4 LayerNorm contribute 316 each \(without them (\S+)\)"
    told = re.match(said, certificate.reason)
    assert float(told[1]) == pytest.approx(certificate.total, rel=1e-2)
    assert float(told[2]) == pytest.approx(expected, rel=1e-2)
    assert "raise eps, or train without norms, see the variant lipschitz" in certificate.reason
    assert certificate.table().splitlines()[-1] == certificate.reason
    assert json.loads(json.dumps(certificate.to_dict()))["reason"] == certificate.reason


def test_a_total_of_use_says_nothing():
    certificate = certify(_encoder(layer_norm_eps=1.0), seq_len=6)
    assert certificate.total < 1e3
    assert certificate.reason == ""
    assert certificate.table().splitlines()[-1].startswith(f"{certificate.total:.4g}")
    assert certify(nn.MultiheadAttention(8, 2, batch_first=True), seq_len=4).reason == ""


def test_a_total_that_no_kind_of_part_makes_is_said_to_be_of_no_use():
    identity = nn.Linear(4, 4)
    nn.init.eye_(identity.weight)
    deep = nn.Sequential(*[InvertibleResidual(identity) for _ in range(11)])
    certificate = certify(deep, seq_len=2)
    assert certificate.total == pytest.approx(2**11, rel=1e-4)
    assert certificate.reason.startswith("of no use at 2.05e+03: no kind of part alone")


def test_the_parts_named_are_those_that_help_most():
    heavy = nn.Sequential(nn.LayerNorm(8, eps=0.1), nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    with torch.no_grad():
        for layer in heavy[1:]:
            layer.weight.copy_(100 * torch.eye(8))
    reason = certify(heavy, seq_len=4).reason
    said = "of no use at 3.16e+04: 2 Linear contribute 100 each (without them 3.16)"
    assert reason.startswith(said)
    assert "constrain_" in reason


def test_the_certificate_is_not_moved_by_its_explanation():
    model = _encoder()
    first, second = certify(model, seq_len=6), certify(model, seq_len=6)
    assert first == second
    assert [layer.path for layer in first.layers].count("layers.0.norm1") == 1


@pytest.mark.parametrize(
    ("family", "name", "model"), [pytest.param(*case, id=case[1]) for case in families.models()]
)
def test_every_family_with_a_bound_says_why_it_is_large(family, name, model):
    everywhere, _ = families.certificates(model)
    if everywhere.label != "uncertified":
        assert re.search(r"\d Norm|LayerNorm|RMSNorm", everywhere.reason)
    else:
        assert everywhere.reason == ""
        assert everywhere.uncertified[0].reason
