"""The cross-check names wrong rules, measures known slopes, and leaves the module unchanged."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from wellposed.certification import LayerBound, certify, register_rule
from wellposed.errors import NotLipschitzError, UnsoundBoundError
from wellposed.nn import L2SelfAttention


class OnlyInFloat64(nn.Linear):
    """A division that underflows in float32: the map is no contraction there, which a float64 copy
    hides."""

    def forward(self, x):
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
        nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8), Claimed(1.0, 0.5, 8)), nn.ReLU()
    )
    with pytest.raises(
        UnsoundBoundError, match=r"1\.1 \(Claimed\) has a slope of .* above its bound 0\.5"
    ):
        certify(model, seq_len=9, norm=norm)
    assert math.isfinite(certify(model, seq_len=9, norm=norm, cross_check=False).total)


def test_the_modules_own_dtype_is_tried_not_a_copy():
    certify(OnlyInFloat64(4, 4).double(), seq_len=3)
    with pytest.raises(UnsoundBoundError, match="OnlyInFloat64"):
        certify(OnlyInFloat64(4, 4), seq_len=3)


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
    """Each layer is finite in float32; their product is not, though its bound in exact arithmetic
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
    """Rounding to bfloat16 changes slopes by 1e-3, which does not violate a bound."""
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


def identity(width=6, scale=1.0):
    linear = nn.Linear(width, width, bias=False).double()
    with torch.no_grad():
        linear.weight.copy_(scale * torch.eye(width))
    return linear


class Claimed(nn.Module):
    """``x -> slope x`` with a chosen bound; it records its inputs."""

    def __init__(self, slope, bound, width=6):
        super().__init__()
        self.slope = slope
        self.bound = bound
        self.in_features = width
        self.inputs = []

    def forward(self, x):
        self.inputs.append(x.detach().clone())
        return self.slope * x


@register_rule(Claimed)
def _claimed(module: Claimed, site: Any) -> LayerBound:
    return LayerBound(module.bound, "as it says", out_radius=math.inf)


SHARED = identity()


@pytest.mark.parametrize("norm", ["tok", 2, "inf"])
@pytest.mark.parametrize(
    ("model", "pairs", "modules", "share"),
    [
        # The module is tested along noise and an ascended direction, each part along the latter
        # only.
        (identity(), 2, 1, 1),
        (nn.Sequential(identity(), identity()), 4, 3, 1),
        (nn.Sequential(identity(scale=2.0), identity(scale=0.25)), 4, 3, 1),
        (nn.Sequential(SHARED, SHARED), 4, 2, 1),
        (nn.Sequential(identity(), nn.Sequential(SHARED, SHARED)), 6, 4, 1),
        (nn.Sequential(identity(scale=0.0)), 3, 2, 0),
        (Claimed(0.5, 2.0), 2, 1, 0.25),
    ],
    ids=range(7),
)
def test_the_pairs_are_counted(model, pairs, modules, share, norm):
    message = f"{pairs} pairs through {modules} modules, largest slope / bound {share:.3f}"
    assert certify(model, seq_len=3, norm=norm).cross_check == message


def test_a_slope_may_exceed_its_bound_by_rounding_and_no_more():
    """64 units of the last place of inputs and outputs, relative to the distance of the inputs."""
    for dtype, allowed, refused in ((torch.float64, 1e-7, 1e-5), (torch.float32, 2e-6, 1e-3)):
        model = nn.Sequential(Claimed(1.0 + allowed, 1.0)).to(dtype)
        model.register_parameter("one", nn.Parameter(torch.ones(1, dtype=dtype)))
        assert certify(model, seq_len=3).cross_check.endswith("largest slope / bound 1.000")
        model[0].slope = 1.0 + refused
        with pytest.raises(UnsoundBoundError, match=r"0 \(Claimed\)"):
            certify(model, seq_len=3)


@pytest.mark.parametrize(
    ("radius", "reach"), [(None, math.sqrt(6)), (0.5, 0.5), (100.0, math.sqrt(6))]
)
def test_inputs_stay_in_the_ball_at_two_sizes(radius, reach):
    """Half of the ball for x, half for the perturbation; the second example at a tenth of that."""
    module = Claimed(1.0, 1.0).eval()
    certify(module, seq_len=9, radius=radius)
    batch = max(module.inputs, key=len)
    assert batch.shape == (6, 4, 6)
    x, aside, ascended = (part.double() for part in batch.split(2))
    for example, share in enumerate((1.0, 0.1)):
        sizes = [part[example].norm(dim=-1).max() for part in (x, aside - x, ascended - x)]
        assert sizes == pytest.approx([0.499 * reach * share] * 3, rel=1e-6)
        for other in (aside, ascended):
            assert float(other[example].norm(dim=-1).max()) <= reach * share
    assert not torch.equal(aside, ascended)


def test_the_innermost_offender_is_named_and_the_largest_bound_of_a_shared_part_counts():
    low = Claimed(1.0, 0.5)
    high = Claimed(1.0, 1.0)
    with pytest.raises(UnsoundBoundError, match=r"1\.0 \(Claimed\)"):
        certify(nn.Sequential(high, nn.Sequential(low, high)), seq_len=3)


def test_a_part_that_turns_tokens_into_one_vector_is_tried_as_a_vector():
    class Mean(nn.Module):
        def forward(self, x):
            return x.mean(1)

    register_rule(Mean)(lambda module, site: LayerBound(1.0, "mean", out_radius=site.radius))
    message = certify(nn.Sequential(identity(), Mean(), identity()), seq_len=4).cross_check
    assert message.startswith("5 pairs through 4 modules")


def test_training_draws_the_same_random_numbers_for_every_input():
    model = nn.Sequential(identity(), nn.Dropout(0.5), identity()).train()
    certificate = certify(model, seq_len=3)
    assert certificate.total == pytest.approx(2.0, rel=1e-5)
    counts, share = certificate.cross_check.rsplit(" ", 1)
    assert counts == "5 pairs through 4 modules, largest slope / bound"
    assert 0 < float(share) <= 1


class Cliff(nn.Module):
    """The identity on short tokens; it overflows on longer ones, those of the first example."""

    def forward(self, x):
        return torch.where(x.abs().amax((1, 2), keepdim=True) > 0.15, math.inf, 1.0) * x


@register_rule(Cliff)
def _cliff(module: Cliff, site: Any) -> LayerBound:
    return LayerBound(1.0, "of short tokens", out_radius=site.radius)


def test_one_example_that_is_not_finite_is_enough():
    reason = r"module \(Cliff\) gives NaN or infinity in torch\.float64 at tokens of norm 0\.499"
    with pytest.raises(NotLipschitzError, match=reason):
        certify(Cliff(), seq_len=3, radius=1.0)
    assert certify(Cliff(), seq_len=3, radius=0.1).cross_check.endswith("1.000")


def test_a_module_that_looks_for_hooks_on_its_parts_is_tried_as_it_runs():
    class Gain(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = identity()

        def forward(self, x):
            return self.part(x) if self.part._forward_hooks else 5 * self.part(x)

    @register_rule(Gain)
    def _only_its_part(module, site):
        return site.chain([("part", module.part)])

    with pytest.raises(UnsoundBoundError, match=r"the module \(Gain\)"):
        certify(Gain(), seq_len=4)
