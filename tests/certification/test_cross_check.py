"""certify tries itself out: a wrong rule is found and named, and nothing of the module is moved by
it."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tests.support.samples import SAMPLES
from torch import nn
from torch.nn.utils import parametrizations

from wellposed.certification import LayerBound, certify, inherit_rule, register_rule
from wellposed.errors import NotLipschitzError, UnsoundBoundError
from wellposed.nn import AdditiveCoupling, L2SelfAttention

CASES = [
    pytest.param(sample, sample.norms[index % len(sample.norms)], id=f"{kind.__name__}-{index}")
    for kind, samples in SAMPLES.items()
    for index, sample in enumerate(samples)
    if sample.attackable
]


class HalfAsMuch(nn.Linear):
    """Its rule promises half of what is true."""


@register_rule(HalfAsMuch)
def _half_as_much(module: HalfAsMuch, site) -> LayerBound:
    return LayerBound(0.5 * site.operator_norm(module.weight), "half", out_radius=math.inf)


class OnlyInFloat64(nn.Linear):
    """A division that underflows in float32: the map is no contraction there, and a float64 copy
    does not show it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tiny = torch.full((), 1e-25, dtype=x.dtype)
        return super().forward(x) * (
            tiny / tiny.square().clamp_min(1e-300).sqrt().clamp_min(torch.finfo(x.dtype).tiny)
        )


@register_rule(OnlyInFloat64)
def _only_in_float64(module: OnlyInFloat64, site) -> LayerBound:
    return LayerBound(site.operator_norm(module.weight), "as in exact arithmetic")


@pytest.mark.parametrize("norm", ["tok", "inf", 2])
def test_a_rule_that_promises_half_is_found_and_named(norm):
    model = nn.Sequential(
        nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8), HalfAsMuch(8, 8, bias=False)), nn.ReLU()
    )
    nn.init.eye_(model[1][1].weight)
    with pytest.raises(
        UnsoundBoundError, match=r"1\.1 \(HalfAsMuch\) has a slope of .* above its bound 0\.5"
    ):
        certify(model, seq_len=9, norm=norm)
    assert math.isfinite(certify(model, seq_len=9, norm=norm, cross_check=False).total)


def test_the_modules_own_dtype_is_tried_not_a_copy():
    certify(OnlyInFloat64(4, 4).double(), seq_len=3)
    with pytest.raises(UnsoundBoundError, match="OnlyInFloat64"):
        certify(OnlyInFloat64(4, 4), seq_len=3)


@pytest.mark.parametrize(("sample", "norm"), CASES)
def test_every_rule_passes_its_own_check(sample, norm):
    certificate = certify(sample.build(8), seq_len=7, norm=norm, radius=1.0)
    assert "largest slope / bound" in certificate.cross_check
    assert certificate.to_dict()["cross_check"] == certificate.cross_check


def test_what_is_not_tried_is_said():
    class Pairs(nn.Linear):
        def forward(self, x, y):
            return super().forward(x + y)

    @register_rule(Pairs)
    def rule(module: Pairs, site) -> LayerBound:
        return LayerBound(site.operator_norm(module.weight), "of the first input")

    assert "not run: TypeError" in certify(Pairs(3, 3), seq_len=2).cross_check
    assert (
        certify(nn.Linear(3, 3), seq_len=2, cross_check=False).cross_check
        == "not run: cross_check=False"
    )
    assert "no bound" in certify(nn.LSTM(3, 3), seq_len=2).cross_check


def test_a_forward_pass_that_overflows_is_no_certificate():
    """Each layer is finite in float32, their product is not, though the bound of exact arithmetic
    is."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
    for layer in model:
        nn.init.constant_(layer.weight, 1e30)
    assert math.isfinite(certify(model, seq_len=2, cross_check=False).total)
    with pytest.raises(
        NotLipschitzError, match=r"1 \(Linear\) gives NaN or infinity in torch.float32"
    ):
        certify(model, seq_len=2)
    assert certify(model.double(), seq_len=2).total > 1e60


@pytest.mark.parametrize("radius", [1e-6, 1e30, math.inf])
def test_a_ball_of_any_size_is_tried_at_sizes_that_the_dtype_holds(radius):
    layer = L2SelfAttention(8, 2)
    assert "largest slope" in certify(layer, seq_len=4, radius=radius).cross_check


def test_a_width_that_no_part_names_is_found():
    coupling = AdditiveCoupling(nn.Linear(4, 4), nn.Linear(4, 4))
    assert "largest slope" in certify(coupling, seq_len=3).cross_check
    assert "largest slope" in certify(nn.Sequential(nn.Tanh(), nn.ReLU()), seq_len=3).cross_check


@pytest.mark.parametrize("inference", [False, True])
def test_nothing_is_moved(inference):
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(32, 32)),
        nn.Dropout(0.5),
        L2SelfAttention(32, 2, contractive=0.9),
    )
    before = copy.deepcopy(model.state_dict())
    learnt = [weight.requires_grad for weight in model.parameters()]
    model[2].o_proj.bias.requires_grad_(False)
    random = torch.get_rng_state()
    with torch.inference_mode(inference):
        model.train()
        totals = {certify(model, seq_len=5).total for _ in range(3)}
        model.eval()
        totals |= {certify(model, seq_len=5).total for _ in range(3)}
    assert torch.equal(random, torch.get_rng_state())
    assert not model[2].o_proj.bias.requires_grad
    assert sum(learnt) - 1 == sum(weight.requires_grad for weight in model.parameters())
    assert all(weight.grad is None for weight in model.parameters())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert len(totals) == 2, (
        "one in train mode, where power iteration moves the weight, one in eval mode"
    )
    assert math.inf in totals


def test_reduced_precision_around_the_call_is_not_the_modules():
    """Rounding to bfloat16 moves slopes by 1e-3, which is no fault of a bound."""
    linear = nn.Linear(64, 64)
    nn.init.orthogonal_(linear.weight)
    plain = certify(linear, seq_len=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert certify(linear, seq_len=4) == plain
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert certify(linear, seq_len=4) == plain
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_slopes_of_random_compositions_stay_below_what_is_certified():
    @inherit_rule
    class Named(nn.Linear):
        pass

    for _ in range(10):
        model = nn.Sequential(
            Named(8, 8), nn.GELU(), L2SelfAttention(8, 2), nn.LayerNorm(8, eps=0.1)
        ).eval()
        share = float(certify(model, seq_len=16).cross_check.rsplit(" ", 1)[1])
        assert 0 < share <= 1
