"""Certificates: no attack beats the radius, other inputs are refused, and tables and dictionaries
are exact."""

import math
import re
from functools import partial

import pytest
import torch
from torch import nn

from wellposed.attack import perturbation_size, steepest_direction
from wellposed.certification import Certificate, CertifiedLayer, LayerBound, certify, register_rule
from wellposed.errors import ConfigError, NotLipschitzError, ShapeError
from wellposed.models import WellposedConfig, WellposedForSequenceClassification

NORMS = ("tok", 2, "inf")
TOKENS = 4
WIDTH = 6


def make_certificate(**changes):
    values = {
        "total": 2.0, "layers": (), "label": "certified", "norm": 2, "tokens": 8, "min_tokens": 1, "mask": "full",
        "domain": "all inputs", "dtype": "float64",
    }  # fmt: skip
    if math.isfinite(changes.get("ball", math.inf)):
        values["domain"] = f"tokens with |x_i| <= {changes['ball']:g}"
    return Certificate(**{**values, **changes})


def make_model(seed, **options):
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 9, "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 3,
        "max_position_embeddings": TOKENS, "norm": "none",
    }  # fmt: skip
    config = WellposedConfig(**{**sizes, **options})
    return WellposedForSequenceClassification(config).double().eval()


def descend(model, embeds, radius, norm):
    """Return the smallest margin that 15 signed or normalised gradient steps find for ``|delta| <=
    radius``."""
    chosen = model(inputs_embeds=embeds).logits.argmax(-1, keepdim=True)

    def margin(delta):
        logits = model(inputs_embeds=embeds + delta).logits
        return (logits.gather(-1, chosen) - logits.scatter(-1, chosen, -math.inf)).amin(-1)

    delta = torch.zeros_like(embeds)
    limits = radius[:, None, None]
    smallest = torch.full_like(radius, math.inf)
    for _ in range(15):
        delta = delta.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(margin(delta).sum(), delta)
        delta = delta.detach() - 0.3 * limits * steepest_direction(gradient, norm)
        if norm == "inf":
            delta = torch.minimum(torch.maximum(delta, -limits), limits)
        else:
            sizes = delta.norm(dim=-1, keepdim=True)
            sizes = sizes if norm == "tok" else sizes.norm(dim=1, keepdim=True)
            delta = delta * (limits / torch.maximum(sizes, limits).clamp_min(1e-300))
        assert bool((perturbation_size(delta, norm) <= radius * (1 + 1e-12)).all())
        with torch.no_grad():
            smallest = torch.minimum(smallest, margin(delta))
    return smallest


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("seed", range(4))
def test_on_a_ball_no_descent_changes_a_decision_or_leaves_the_ball(seed, norm):
    model = make_model(seed, attention="dot_product")
    with torch.no_grad():
        model.classifier.bias.copy_(torch.tensor([0.0, 30.0, 0.0]) * (seed % 2))
    ball = (0.05, 0.5, 1.0, 3.0)[seed]
    certificate = certify(model, seq_len=TOKENS, norm=norm, radius=ball)
    assert certificate.ball == ball
    embeds = torch.randn(12, TOKENS, WIDTH, dtype=torch.float64)
    embeds *= (torch.linspace(0.1, 1.2, 12) * ball / embeds.norm(dim=-1).amax(-1))[:, None, None]
    largest = embeds.norm(dim=-1).amax(-1)
    logits = model(inputs_embeds=embeds).logits
    radius = certificate.radius(logits, largest_token=largest, width=WIDTH)
    inside = largest < ball
    assert bool((radius[inside] > 0).all())
    assert bool((radius[~inside] == 0).all())
    moved = largest + radius * (math.sqrt(WIDTH) if norm == "inf" else 1)
    assert bool((moved[inside] <= ball * (1 + 1e-12)).all())
    assert bool((descend(model, embeds[inside], radius[inside], norm) > 0).all())


def test_every_input_has_its_own_room():
    logits = torch.tensor([[9.0, 0.0]] * 3)
    largest = torch.tensor([0.5, 3.0, math.nan])
    radii = make_certificate(ball=2.0, total=0.1).radius(logits, largest_token=largest)
    assert radii.tolist() == [1.5, 0.0, 0.0]
    with pytest.raises(ShapeError, match=r"largest_token as one number or \(3,\)"):
        make_certificate(ball=2.0).radius(logits, largest_token=largest[:, None])
    with pytest.raises(ShapeError, match=r"labels must be in \[0, 2\), received \[-100, 2\]"):
        make_certificate().radius(logits, torch.tensor([1, 2, -100]))
    with pytest.raises(ShapeError, match=r"labels \(3,\), received \(1,\)"):
        make_certificate().radius(logits, torch.tensor([0]))


def test_a_certificate_on_a_ball_asks_where_the_input_stands():
    logits = torch.tensor([1.0, 0.0])
    message = r"tokens with \|x_i\| <= 2 only.*\n.*give largest_token="
    with pytest.raises(ConfigError, match=message):
        make_certificate(ball=2.0).radius(logits)
    with pytest.raises(ConfigError, match="must be >= 0"):
        make_certificate(ball=2.0).radius(logits, largest_token=-1.0)
    with pytest.raises(ConfigError, match=r"give largest_token=[^\n]*\n.*give width= >= 1"):
        make_certificate(ball=2.0, norm="inf").radius(logits)
    # all inputs: no ball to leave
    assert float(make_certificate().radius(logits, largest_token=99.0)) > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"total": math.inf, "label": "uncertified"},
        {"total": math.inf, "label": "uncertified", "head": (torch.eye(2), 1.0)},
        {"total": math.inf, "head": (torch.zeros(2, 2), 1.0)},
        {"total": 1.0, "label": "uncertified"},
        {"total": math.nan},
        {"total": math.nan, "head": (torch.eye(2), 1.0)},
        {"head": (torch.eye(2), math.nan)},
        {"head": (torch.full((2, 2), math.nan), 1.0)},
    ],
)
def test_without_a_bound_the_radius_is_zero(changes):
    logits = torch.tensor([[5.0, 0.0], [0.0, 0.0], [math.inf, 0.0]])
    assert make_certificate(**changes).radius(logits).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("total", [0.0, 2.0])
def test_logits_that_are_not_finite_have_radius_zero(bad, total):
    logits = torch.tensor([[3.0, bad, 0.0], [bad, bad, bad], [3.0, 0.0, 0.0]])
    for labels in (None, torch.tensor([0, 0, 0])):
        radii = make_certificate(total=total).radius(logits, labels)
        assert radii[:2].tolist() == [0.0, 0.0]
        assert float(radii[2]) > 0


def test_a_head_so_small_that_its_square_vanishes_is_no_constant():
    """|w_0 - w_1| = 1e-200: its square underflows to 0, but the radius 1e-190 / 1e-200 = 1e10 is
    finite."""
    weight = torch.tensor([[1e-200, 0.0], [0.0, 0.0]], dtype=torch.float64)
    certificate = make_certificate(total=1.0, head=(weight, 1.0))
    logits = torch.tensor([1e-190, 0.0], dtype=torch.float64)
    assert float(certificate.radius(logits)) == pytest.approx(1e10)
    equal = make_certificate(total=1.0, head=(torch.ones(2, 2), 1.0))
    assert float(equal.radius(logits)) == math.inf


def test_lengths_are_checked_on_both_sides():
    certificate = make_certificate(tokens=8, min_tokens=4)
    logits = torch.tensor([[1.0, 0.0]] * 3)
    assert bool((certificate.radius(logits, tokens=torch.tensor([4, 8, 6])) > 0).all())
    long = "at most 8 tokens, received 9 (1 of 3 inputs are longer); certify again with seq_len=9"
    short = "at least 4 real tokens, received 1 (2 of 3 inputs are shorter); certify again with min"
    with pytest.raises(ShapeError) as caught:
        certificate.radius(logits, tokens=torch.tensor([1, 3, 9]))
    assert long in str(caught.value)
    assert f"{short}_tokens=1" in str(caught.value)
    with pytest.raises(ShapeError, match="classes >= 2"):
        certificate.radius(torch.zeros(3, 1), tokens=4)
    with pytest.raises(ShapeError, match="received 2 "):
        certificate.radius(logits, tokens=2)
    with pytest.raises(ShapeError, match="leave out inputs without tokens"):
        make_certificate().radius(logits, tokens=torch.tensor([0, 1, 2]))
    with pytest.raises(ShapeError, match=r"tokens as one number or \(3,\)"):
        certificate.radius(logits, tokens=torch.tensor([4, 4]))
    with pytest.raises(ShapeError, match=r"at least 4 real tokens.*give tokens="):
        certificate.radius(logits)


def test_a_last_map_of_another_class_is_not_read_off_its_weight():
    """The head's rows alone gave ten times the radius."""

    class Tenfold(nn.Linear):
        def forward(self, input):  # noqa: A002
            return 10 * super().forward(input)

    bound = lambda module, site: LayerBound(10 * site.operator_norm(module.weight), "")  # noqa: E731
    register_rule(Tenfold)(bound)
    model = make_model(0, attention="cosine")
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    plain = certify(model, seq_len=TOKENS)
    radius = float(plain.radius(logits))
    model.classifier.__class__ = Tenfold
    tenfold = certify(model, seq_len=TOKENS)
    assert tenfold.total == pytest.approx(10 * plain.total)
    assert float(tenfold.radius(logits)) <= radius / 9.999


def test_a_classifier_inside_a_module_has_the_rows_it_has_alone():
    model = make_model(1, attention="cosine")
    alone = certify(model, seq_len=TOKENS, norm=2)
    within = certify(nn.Sequential(model), seq_len=TOKENS, norm=2, cross_check=False)
    rows = [(f"0.{row.path}", row.lipschitz) for row in alone.layers]
    bounds = [(row.path, row.lipschitz) for row in within.layers]
    assert bounds == [("0", alone.total), *rows]


everywhere = partial(CertifiedLayer, radius=math.inf)
BODY = everywhere("body", "Sequential", 6.0, "product of the parts", "certified", "")
FIRST = everywhere("body.a", "Linear", 2.0, "largest singular value", "exact", "assumes this")
LOST = CertifiedLayer("body.b", "LSTM", math.inf, "none", "uncertified", "no rule", 12.3456)
# Beside the body, not inside it.
BESIDE = everywhere("bodyguard", "Linear", 3.0, "", "exact", "only a reason")
LAST = CertifiedLayer("c", "ReLU", 1.0, "largest slope", "exact", "", 0.5)
HOLLOW = {"total": math.inf, "label": "uncertified", "norm": "tok", "tokens": 7}
OPEN = make_certificate(**HOLLOW, layers=(BODY, FIRST, LOST, BESIDE, LAST), dtype="float32")
CLOSED = make_certificate(
    total=1.23456789,
    layers=(BESIDE, LAST),
    tokens=7,
    min_tokens=3,
    mask="any/full",
    dtype="float32",
    ball=2.0,
    notes=("a note", "another"),
    head=(torch.eye(2), 1.0),
    reason="of no use",
)


def cells(certificate):
    """Return the lines of a table, cut at its columns."""
    return [re.split(r" {2,}", line) for line in certificate.table().splitlines()]


def test_the_table_has_the_numbers_of_its_rows():
    for certificate in (OPEN, CLOSED):
        assert str(certificate) == certificate.table()
        heading, *rows = cells(certificate)
        assert heading == ["bound", "label", "radius", "module", "form or reason"]
        for cut, row in zip(rows, certificate.layers, strict=False):
            bound, label, radius, name, reason = cut
            assert (float(bound), label) == (row.lipschitz, row.label)
            assert float(radius) == pytest.approx(row.radius, rel=1e-3)
            assert name == f"{row.path} ({row.module})"
            assert row.reason in reason
            assert row.form.replace("none", "") in reason

    *_, total = cells(OPEN)
    assert total[:3] == ["inf", "uncertified", "total, norm tok"]
    *_, total, reason = cells(CLOSED)
    assert total[:3] == ["1.235", "certified", "total, norm 2"]
    for words in ("3 to 7 tokens", "any/full", "|x_i| <= 2", "float32", *CLOSED.notes):
        assert words in total[3]
    assert reason == [CLOSED.reason]


def test_the_dictionary_holds_plain_values_alone():
    plain = CLOSED.to_dict()
    layers = plain.pop("layers")
    assert plain == {
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
        "options": "",
        "form": "",
        "around": 0,
        "reach": "inf",
        "attained": None,
        "notes": ["a note", "another"],
    }
    assert [layer["path"] for layer in layers] == ["bodyguard", "c"]
    assert layers[0]["radius"] == "inf"
    assert layers[1] == vars(LAST)
    assert OPEN.to_dict()["total"] == "inf"


def test_losses_are_the_innermost_factors_above_one_and_the_largest_comes_first():
    assert OPEN.losses() == [LOST, BESIDE, FIRST]
    assert CLOSED.losses() == [BESIDE]
    small = everywhere("body.a", "Linear", 0.9, "largest singular value", "exact", "")
    root = everywhere("", "Model", math.inf, "none", "uncertified", "no rule")
    # Parts of at most 1 may add up to more, and a model may be its one row.
    assert make_certificate(**HOLLOW, layers=(BODY, small)).losses() == [BODY]
    assert make_certificate(**HOLLOW, layers=(root,)).losses() == [root]
    assert make_certificate(**HOLLOW, layers=(root, LOST)).losses() == [LOST]


def test_what_has_no_bound_is_named_innermost():
    outer = everywhere("body", "Sequential", math.inf, "none", "uncertified", "see body.b")
    root = everywhere("", "Model", math.inf, "none", "uncertified", "see body")
    certificate = make_certificate(**HOLLOW, layers=(root, outer, LOST, BESIDE))
    assert certificate.uncertified == (LOST,)
    with pytest.raises(NotLipschitzError) as caught:
        certificate.require()
    assert "body.b (LSTM): no rule" in str(caught.value)
    assert "bodyguard" not in str(caught.value)
    alone = make_certificate(**HOLLOW, layers=(root,))
    with pytest.raises(NotLipschitzError, match=r"\(the module itself\) \(Model\): see body"):
        alone.require()
    overflown = make_certificate(**HOLLOW, layers=(BESIDE,))
    with pytest.raises(NotLipschitzError, match="the product overflows"):
        overflown.require()
    assert CLOSED.require() is CLOSED
