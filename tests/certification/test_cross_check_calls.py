"""How the cross-check calls a module, and that one example that overflows among two is enough."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.certification import LayerBound, certify, gated_feedforward_bound, register_rule
from wellposed.errors import NotLipschitzError
from wellposed.nn import OrthogonalFeedForward


class Masked(nn.Module):
    """Notes whether it was called as causal."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: set[bool] = set()

    def forward(self, x: Tensor, *, is_causal: bool = False) -> Tensor:
        self.calls.add(is_causal)
        return x


class Unmasked(nn.Module):
    """Has no such argument."""

    def forward(self, x: Tensor) -> Tensor:
        return x


@register_rule(Masked)
@register_rule(Unmasked)
def _asks_for_the_mask(module: nn.Module, site: Any) -> LayerBound:
    return LayerBound(1.0, f"under {site.mask}", out_radius=site.radius)


@pytest.mark.parametrize(
    ("mask", "called"), [("causal", {True}), ("full", {False}), ("any", {False}), (None, {False})]
)
def test_a_causal_certificate_is_tried_with_causal_calls(mask: Any, called: set[bool]) -> None:
    module = Masked()
    assert certify(module, seq_len=3, mask=mask).cross_check.endswith("1.000")
    assert module.calls == called
    assert certify(Unmasked(), seq_len=3, mask=mask).cross_check.endswith("1.000")


class Cliff(nn.Module):
    """The identity on short tokens; longer ones, of the first example, leave the range."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x.abs().amax((1, 2), keepdim=True) > 0.15, math.inf, 1.0) * x


@register_rule(Cliff)
def _cliff(module: Cliff, site: Any) -> LayerBound:
    return LayerBound(1.0, "of short tokens", out_radius=site.radius)


def test_one_example_that_is_not_finite_is_enough() -> None:
    with pytest.raises(NotLipschitzError, match="gives NaN or infinity"):
        certify(Cliff(), seq_len=3, radius=1.0)
    assert certify(Cliff(), seq_len=3, radius=0.1).cross_check.endswith("1.000")


SLOPES: dict[str, tuple[nn.Module, Any]] = {
    "relu": (nn.ReLU(), F.relu),
    "gelu": (nn.GELU(), F.gelu),
    "tanh gelu": (nn.GELU(approximate="tanh"), None),
    "silu": (nn.SiLU(), F.silu),
    "mish": (nn.Mish(), F.mish),
    "hardswish": (nn.Hardswish(), F.hardswish),
    "selu": (nn.SELU(), F.selu),
    "elu": (nn.ELU(), F.elu),
    "tanh": (nn.Tanh(), torch.tanh),
    "sigmoid": (nn.Sigmoid(), torch.sigmoid),
    "hardsigmoid": (nn.Hardsigmoid(), None),
    "log sigmoid": (nn.LogSigmoid(), None),
    "softsign": (nn.Softsign(), None),
    "tanhshrink": (nn.Tanhshrink(), None),
    "relu6": (nn.ReLU6(), F.relu6),
    "hardtanh": (nn.Hardtanh(), None),
}


@pytest.mark.parametrize("name", SLOPES)
def test_the_slope_of_an_activation_is_the_steepest_of_a_fine_grid(name: str) -> None:
    module, function = SLOPES[name]
    points = torch.linspace(-30, 30, 600_001, dtype=torch.float64)
    steepest = float((module(points).diff() / points.diff()).abs().max())
    assert certify(module, seq_len=2).total == pytest.approx(steepest, rel=2e-4)
    if function is not None:
        layer = (
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, activation=function)
            .double()
            .eval()
        )
        with torch.no_grad():
            layer.linear1.bias.zero_()
        rows = {
            row.path: row for row in certify(layer, seq_len=2, radius=1.0, cross_check=False).layers
        }
        ball = rows["linear1"].lipschitz * rows["linear1"].radius * steepest
        assert rows["linear2"].radius == pytest.approx(
            math.inf if name == "sigmoid" else ball, rel=3e-4
        )


class Gated(nn.Module):
    """W_d (silu(W_g x) * W_u x), with biases of a largest entry each."""

    def __init__(self, up: Tensor, gate: Tensor, down: Tensor) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Parameter(up), nn.Parameter(gate), nn.Parameter(down)

    def forward(self, x: Tensor) -> Tensor:
        return (F.silu(x @ self.gate.T + 0.25) * (x @ self.up.T - 0.5)) @ self.down.T


@register_rule(Gated)
def _gated(module: Gated, site: Any) -> LayerBound:
    value = gated_feedforward_bound(
        module.up, module.gate, module.down, site, slope=1.1, up_bias=0.5, gate_bias=0.25
    )
    return LayerBound(value, "gated")


def test_a_gated_feedforward_by_its_rows() -> None:
    """|W_d| (l |W_g| max|u| + max|g| |W_u|); |u| is bounded by the longest row of W_u, not by its
    norm."""
    up = torch.tensor([[3.0, 4.0], [3.0, 4.0], [0.0, 1.0]], dtype=torch.float64)
    gate = torch.tensor([[0.0, 2.0], [2.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    down = torch.tensor([[0.5, 0.0, 0.0], [0.0, 1.5, 0.0]], dtype=torch.float64)
    for norm, size in (
        ("tok", lambda w: torch.linalg.matrix_norm(w, 2)),
        ("inf", lambda w: w.abs().sum(-1).max()),
    ):
        sizes = [float(size(w)) for w in (up, gate, down)]
        largest_up, largest_gate = 5.0 * 0.7 + 0.5, 2.0 * 0.7 + 0.25
        expected = sizes[2] * (1.1 * sizes[1] * largest_up + sizes[0] * largest_gate)
        found = certify(Gated(up, gate, down), seq_len=2, norm=norm, radius=0.7)
        assert found.total == pytest.approx(expected, rel=1e-5)


def test_training_without_dropout_is_no_reason_to_refuse() -> None:
    assert certify(OrthogonalFeedForward(4).train(), seq_len=2).label == "certified"
