"""Couplings of known parts: the shears, the ball between them and the one that comes out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from wellposed.certification import certify
from wellposed.nn import AdditiveCoupling

R = 0.6


def diagonal(size: float, shift: float) -> nn.Linear:
    linear = nn.Linear(3, 3).double()
    with torch.no_grad():
        linear.weight.copy_(size * torch.eye(3))
        linear.bias.copy_(torch.tensor([shift, 0.0, 0.0]))
    return linear


def shear(size: float) -> float:
    """The largest singular value of [[1, L], [0, 1]]."""
    return float(
        torch.linalg.svdvals(torch.tensor([[1.0, size], [0.0, 1.0]], dtype=torch.float64))[0]
    )


def test_an_additive_coupling() -> None:
    model = nn.Sequential(
        AdditiveCoupling(diagonal(2.0, 0.1), diagonal(0.5, 0.3)), nn.Linear(6, 6).double()
    )
    for norm, bound in (("tok", 3.0 * 1.5), ("inf", 3.0 * 1.5), (2, shear(2.0) * shear(0.5))):
        rows = {row.path: row for row in certify(model, seq_len=3, norm=norm, radius=R).layers}
        assert rows["0"].lipschitz == pytest.approx(bound, rel=1e-5)
        # (a, b) -> (a + f(b), b) -> (a + f(b), b + g(a + f(b))), each half no longer than R at
        # first.
        middle = R + (2.0 * R + 0.1)
        assert rows["0.f"].radius == pytest.approx(R)
        assert rows["0.g"].radius == pytest.approx(middle, rel=1e-5)
        assert rows["1"].radius == pytest.approx(
            math.hypot(middle, R + 0.5 * middle + 0.3), rel=1e-5
        )
    assert certify(model[0], seq_len=3).total == pytest.approx(4.5, rel=1e-5)


def test_a_coupling_of_a_part_without_a_bound_names_it() -> None:
    for f, g, name in ((nn.LSTM(3, 3), diagonal(1, 0), "f"), (diagonal(1, 0), nn.LSTM(3, 3), "g")):
        certificate = certify(AdditiveCoupling(f, g), seq_len=3, norm=2)
        assert certificate.total == math.inf
        assert [row.path for row in certificate.uncertified] == [name]
