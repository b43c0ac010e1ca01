"""What the cross-check counts and says, on maps whose slope is known, and how far it lets a slope
exceed a bound."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wellposed.certification import LayerBound, certify, register_rule
from wellposed.errors import NotLipschitzError, UnsoundBoundError


def identity(width: int = 6, scale: float = 1.0) -> nn.Linear:
    linear = nn.Linear(width, width, bias=False).double()
    with torch.no_grad():
        linear.weight.copy_(scale * torch.eye(width))
    return linear


class Claimed(nn.Module):
    """``x -> slope x`` under a bound that is given; and what it was called with."""

    def __init__(self, slope: float, bound: float, width: int = 6) -> None:
        super().__init__()
        self.slope, self.bound, self.in_features = slope, bound, width
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().clone())
        return self.slope * x


@register_rule(Claimed)
def _claimed(module: Claimed, site: Any) -> LayerBound:
    return LayerBound(module.bound, "as it says", out_radius=math.inf)


SHARED = identity()


@pytest.mark.parametrize("norm", ["tok", 2, "inf"])
@pytest.mark.parametrize(
    ("model", "said"),
    [
        # The whole is tried along noise and along an ascended direction, each part along the latter
        # alone.
        (identity(), "2 pairs through 1 modules, largest slope / bound 1.000"),
        (
            nn.Sequential(identity(), identity()),
            "4 pairs through 3 modules, largest slope / bound 1.000",
        ),
        (
            nn.Sequential(identity(scale=2.0), identity(scale=0.25)),
            "4 pairs through 3 modules, largest slope / bound 1.000",
        ),
        (nn.Sequential(SHARED, SHARED), "4 pairs through 2 modules, largest slope / bound 1.000"),
        (
            nn.Sequential(identity(), nn.Sequential(SHARED, SHARED)),
            "6 pairs through 4 modules, largest slope / bound 1.000",
        ),
        (
            nn.Sequential(identity(scale=0.0)),
            "3 pairs through 2 modules, largest slope / bound 0.000",
        ),
    ],
    ids=range(6),
)
def test_the_pairs_are_counted(model: nn.Module, said: str, norm: Any) -> None:
    assert certify(model, seq_len=3, norm=norm).cross_check == said


@pytest.mark.parametrize("norm", ["tok", 2, "inf"])
def test_the_share_of_a_bound_is_slope_over_bound(norm: Any) -> None:
    said = certify(Claimed(0.5, 2.0), seq_len=3, norm=norm).cross_check
    assert said == "2 pairs through 1 modules, largest slope / bound 0.250"
    with pytest.raises(
        UnsoundBoundError, match=r"the module \(Claimed\) has a slope of 0\.5 .*bound 0\.499"
    ):
        certify(Claimed(0.5, 0.499), seq_len=3, norm=norm)


def test_a_slope_may_exceed_its_bound_by_rounding_and_no_more() -> None:
    """64 units of the last place of inputs and outputs, as a share of how far apart the inputs
    are."""
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
def test_inputs_stay_in_the_ball_at_two_sizes(radius: float | None, reach: float) -> None:
    """Half of the ball for x, half for what is added; the second example at a tenth of that."""
    module = Claimed(1.0, 1.0).eval()
    certify(module, seq_len=9, radius=radius)
    whole = max(module.seen, key=len)
    assert whole.shape == (6, 4, 6)
    x, aside, ascended = (part.double() for part in whole.split(2))
    for example, share in enumerate((1.0, 0.1)):
        assert float(x[example].norm(dim=-1).max()) == pytest.approx(
            0.499 * reach * share, rel=1e-6
        )
        for other in (aside, ascended):
            assert float((other - x)[example].norm(dim=-1).max()) == pytest.approx(
                0.499 * reach * share, rel=1e-6
            )
            assert float(other[example].norm(dim=-1).max()) <= reach * share
    assert not torch.equal(aside, ascended)


@pytest.mark.parametrize(
    ("options", "tokens"),
    [({"seq_len": 2}, 2), ({"seq_len": 9}, 4), ({"seq_len": 9, "min_tokens": 6}, 6)],
)
def test_how_many_tokens_it_is_tried_with(options: dict[str, int], tokens: int) -> None:
    module = Claimed(1.0, 1.0)
    certify(module, **options)
    assert {x.shape[1] for x in module.seen} == {tokens}


def test_the_innermost_offender_is_named_and_the_largest_bound_of_a_shared_part_counts() -> None:
    low, high = Claimed(1.0, 0.5), Claimed(1.0, 1.0)
    with pytest.raises(UnsoundBoundError, match=r"1\.0 \(Claimed\)"):
        certify(nn.Sequential(high, nn.Sequential(low, high)), seq_len=3)


def test_numbers_that_are_not_finite_are_no_slope() -> None:
    class Blows(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * math.inf

    register_rule(Blows)(lambda module, site: LayerBound(1.0, "it says"))
    with pytest.raises(
        NotLipschitzError, match=r"the module \(Blows\) gives NaN or infinity in torch\.float32"
    ):
        certify(Blows(4, 4), seq_len=3)


def test_a_part_that_turns_tokens_into_one_vector_is_tried_as_a_vector() -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(1)

    register_rule(Mean)(lambda module, site: LayerBound(1.0, "mean", out_radius=site.radius))
    said = certify(nn.Sequential(identity(), Mean(), identity()), seq_len=4).cross_check
    assert said.startswith("5 pairs through 4 modules")


def test_training_draws_the_same_random_numbers_for_every_input() -> None:
    model = nn.Sequential(identity(), nn.Dropout(0.5), identity()).train()
    certificate = certify(model, seq_len=3)
    assert certificate.total == pytest.approx(2.0, rel=1e-5)
    said, share = certificate.cross_check.rsplit(" ", 1)
    assert said == "5 pairs through 4 modules, largest slope / bound"
    assert 0 < float(share) <= 1
