"""Every simple part: its bound in each norm, and the ball that its output fills, as numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from wellposed.certification import certify, layer_norm_bound
from wellposed.nn import BallProjection, MaxMin

WIDTH, R = 4, 0.3
NORMS = ("tok", 2, "inf")


def linear(*, bias: bool = True) -> nn.Linear:
    module = nn.Linear(WIDTH, WIDTH, bias=bias).double()
    with torch.no_grad():
        module.weight.copy_(
            torch.tensor([[3.0, 4, 0, 0], [0, 0, 0, 0], [0, 0, 0, -2], [0, 0, 0, 0]])
        )
        if bias:
            module.bias.copy_(torch.tensor([0.6, 0, -0.8, 0]))
    return module


def normed(kind: type[nn.Module], eps: float) -> nn.Module:
    module = kind(WIDTH, eps=eps).double()
    with torch.no_grad():
        module.weight.copy_(torch.tensor([1.0, -2.0, 0.5, 0.0]))
        if getattr(module, "bias", None) is not None:
            module.bias.copy_(torch.tensor([0.0, 0.3, 0.0, 0.4]))
    return module


def ends(module: nn.Module, norm: Any, radius: float | None) -> tuple[float, float]:
    """The bound of a module, and the ball that what follows it is promised."""
    certificate = certify(
        nn.Sequential(module, linear()), seq_len=3, norm=norm, radius=radius, cross_check=False
    )
    by_path = {row.path: row for row in certificate.layers}
    # An identity has no row.
    return by_path["0"].lipschitz if "0" in by_path else 1.0, by_path["1"].radius


def mean_of_four(centred: bool) -> float:
    """The factor of a norm in the inf-norm: 2 - 2/D of centring, or 1, and (1 + sqrt D)/2."""
    return (1.5 if centred else 1.0) + 1.5


PARTS: list[tuple[str, nn.Module, dict[Any, float], float, float]] = [
    # name, module, bound by norm, ball out of the ball of radius R, ball out of the whole space
    ("linear", linear(), {"tok": 5, 2: 5, "inf": 7}, 5 * R + 1, math.inf),
    ("linear without bias", linear(bias=False), {"tok": 5, 2: 5, "inf": 7}, 5 * R, math.inf),
    ("identity", nn.Identity(), dict.fromkeys(NORMS, 1), R, math.inf),
    ("relu", nn.ReLU(), dict.fromkeys(NORMS, 1), R, math.inf),
    ("elu", nn.ELU(alpha=2.5), dict.fromkeys(NORMS, 2.5), 2.5 * R, math.inf),
    ("small elu", nn.ELU(alpha=0.5), dict.fromkeys(NORMS, 1), R, math.inf),
    ("leaky", nn.LeakyReLU(-3.0), dict.fromkeys(NORMS, 3), 3 * R, math.inf),
    ("sigmoid", nn.Sigmoid(), dict.fromkeys(NORMS, 0.25), math.inf, math.inf),
    ("hardswish", nn.Hardswish(), dict.fromkeys(NORMS, 1.5), 1.5 * R, math.inf),
    ("dropout", nn.Dropout(0.75).train(), dict.fromkeys(NORMS, 4), 4 * R, math.inf),
    ("no dropout", nn.Dropout(0.75).eval(), dict.fromkeys(NORMS, 1), R, math.inf),
    ("maxmin", MaxMin(), dict.fromkeys(NORMS, 1), R, math.inf),
    ("wide ball", BallProjection(WIDTH, radius=0.5), {"tok": 1, 2: 1, "inf": 1}, R, 0.5),
    (
        "layer norm",
        normed(nn.LayerNorm, 0.25),
        {"tok": 4, 2: 4, "inf": 4 * mean_of_four(True)},
        4 * R + 0.5,
        4.5,
    ),
    (
        "rms norm",
        normed(nn.RMSNorm, 0.25),
        {"tok": 4, 2: 4, "inf": 4 * mean_of_four(False)},
        4 * R,
        4.0,
    ),
    (
        "steep norm",
        normed(nn.LayerNorm, 1e-4),
        {"tok": 200, 2: 200, "inf": 200 * mean_of_four(True)},
        4.5,
        4.5,
    ),
]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("module", "bounds", "ball", "everywhere"),
    [part[1:] for part in PARTS],
    ids=[p[0] for p in PARTS],
)
def test_the_bound_and_the_ball_of_a_part(
    module: nn.Module, bounds: dict[Any, float], ball: float, everywhere: float, norm: Any
) -> None:
    found = ends(module, norm, R)
    assert found == (pytest.approx(bounds[norm], rel=1e-5), pytest.approx(ball, rel=1e-5))
    assert ends(module, norm, None)[1] == pytest.approx(everywhere, rel=1e-5)


@pytest.mark.parametrize("norm", NORMS)
def test_a_projection_onto_a_ball_smaller_than_what_comes(norm: Any) -> None:
    for radius in (0.2, 0.2999):
        bound, ball = ends(BallProjection(WIDTH, radius=radius), norm, R)
        assert bound == pytest.approx(1.5 if norm == "inf" else 1.0)
        assert ball == pytest.approx(radius)
    assert ends(BallProjection(WIDTH, radius=R), norm, R) == (1.0, R)


def test_a_part_that_stands_nested_has_the_ball_of_what_came_before_it() -> None:
    inner = nn.Sequential(linear(bias=False), nn.ELU(alpha=2.0))
    model = nn.Sequential(linear(), inner, nn.ReLU(), linear())
    certificate = certify(model, seq_len=3, radius=R, cross_check=False)
    radii = {row.path: row.radius for row in certificate.layers}
    first = 5 * R + 1
    assert radii == {
        "0": pytest.approx(R),
        "1": pytest.approx(first, rel=1e-5),
        "1.0": pytest.approx(first, rel=1e-5),
        "1.1": pytest.approx(5 * first, rel=1e-5),
        "2": pytest.approx(10 * first, rel=1e-5),
        "3": pytest.approx(10 * first, rel=1e-5),
    }
    assert certificate.total == pytest.approx(5 * 5 * 2 * 5, rel=1e-5)


@pytest.mark.parametrize("width", [1, 2, 9])
def test_norm_layers_in_every_norm(width: int) -> None:
    for gain, eps, least in ((1.0, 0.04, 0.0), (3.0, 0.0, 0.5), (2.0, 0.09, 0.4)):
        slope = gain / math.hypot(math.sqrt(eps), least)
        for norm in ("tok", 2):
            assert layer_norm_bound(gain, eps, width, norm=norm, min_std=least) == pytest.approx(
                slope
            )
        centred = 2 - 2 / width + (1 + math.sqrt(width)) / 2
        assert layer_norm_bound(gain, eps, width, norm="inf", min_std=least) == pytest.approx(
            slope * centred
        )
        plain = 1 + (1 + math.sqrt(width)) / 2
        found = layer_norm_bound(gain, eps, width, norm="inf", min_std=least, centred=False)
        assert found == pytest.approx(slope * plain)
    assert layer_norm_bound(0.0, 0.0, width) == 0.0
    assert layer_norm_bound(1e-9, 0.0, width) == math.inf


def test_dropout_that_drops_everything_and_flattening_have_no_bound() -> None:
    assert certify(nn.Dropout(1.0).train(), seq_len=2).total == math.inf
    assert certify(nn.Dropout(0.0).train(), seq_len=2).total == 1.0
    assert "mixes tokens into one vector" in certify(nn.Flatten(), seq_len=2).table()
    assert (
        "a norm over 2 dimensions mixes tokens" in certify(nn.LayerNorm((3, 4)), seq_len=3).table()
    )
