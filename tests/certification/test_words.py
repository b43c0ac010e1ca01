"""What refusals and errors of certificates say, where a number or a name in them was seen by no
other test."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from wellposed.certification import LayerBound, certify, lipschitz_lower_bound, register_rule
from wellposed.errors import NotLipschitzError


class Blows(nn.Linear):
    """Finite for a bound, and for no input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * math.inf


@register_rule(Blows)
def _blows(module: Blows, site) -> LayerBound:
    return LayerBound(1.0, "it says")


def test_the_size_of_a_token_that_overflows_is_that_of_the_longest() -> None:
    """Half of a ball of radius 2 = sqrt 4, less a thousandth, is where the first example's longest
    token lies."""
    with pytest.raises(NotLipschitzError, match=r"in torch\.float32 at tokens of norm 0\.998, so"):
        certify(Blows(4, 4), seq_len=3)


@pytest.mark.parametrize("activation", [torch.sin, lambda x: x.square()], ids=["named", "nameless"])
def test_a_function_of_unknown_slope_is_refused_by_its_name(activation) -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, activation=activation).eval()
    name = getattr(activation, "__name__", "")
    with pytest.raises(NotLipschitzError) as caught:
        certify(layer, seq_len=3, radius=1.0).require()
    assert (
        f"the largest slope of the activation {name} is not known; use a torch.nn activation module"
        in str(caught.value)
    )


@pytest.mark.parametrize("activation", [torch.sigmoid, torch.tanh, nn.functional.silu, nn.SiLU()])
def test_a_function_has_the_slope_and_the_ball_of_its_module(activation) -> None:
    layer = (
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, activation=activation).double().eval()
    )
    rows = {row.path: row for row in certify(layer, seq_len=3, radius=1.0).layers}
    slope = {torch.sigmoid: 0.25, torch.tanh: 1.0}.get(activation, 1.09984)
    up = rows["linear1"]
    shift = float(layer.linear1.bias.detach().norm())
    ball = math.inf if activation is torch.sigmoid else slope * (up.lipschitz * up.radius + shift)
    assert rows["linear2"].radius == pytest.approx(ball, rel=1e-4)


def test_a_function_without_a_gradient_is_measured_all_the_same() -> None:
    found = lipschitz_lower_bound(
        lambda x: 3 * x.detach(),
        (2, 2),
        restarts=2,
        steps=3,
        dtype=None,
        start=torch.randn(2, 2, 2),
    )
    assert found.value == pytest.approx(3.0, rel=1e-4)
    assert found.jacobian == 0.0


@pytest.mark.parametrize(
    ("threshold", "is_bounded"),
    [(40.0, True), (37.0, True), (30.0, False), (20.0, False), (0.0, False), (-1.0, False)],
)
def test_softplus_jumps_by_less_than_a_rounding_or_is_refused(
    threshold: float, is_bounded: bool
) -> None:
    model = nn.Sequential(nn.Softplus(threshold=threshold), nn.Linear(3, 3).double())
    assert math.isfinite(certify(model, seq_len=2, cross_check=False).total) == is_bounded


def test_heads_and_tables_that_differ_are_named_in_full() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True, kdim=3)
    said = {
        "a width of their own": attention,
        "batch_first = True": nn.MultiheadAttention(4, 2),
        "put in a token of their own": nn.MultiheadAttention(
            4, 2, batch_first=True, add_bias_kv=True
        ),
        "token of their own": nn.MultiheadAttention(4, 2, batch_first=True, add_zero_attn=True),
        "dropout on attention weights is on": nn.MultiheadAttention(
            4, 2, batch_first=True, dropout=0.1
        ).train(),
    }
    for words, module in said.items():
        with pytest.raises(NotLipschitzError, match=words):
            certify(module, seq_len=3, radius=1.0).require()
