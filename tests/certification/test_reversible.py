"""Invertible blocks: their certificates hold, and the bounds of the parts enter as they should."""

import math

import pytest
import torch
from tests.support.certificates import rows
from torch import nn

from wellposed.attack import lipschitz_lower_bound
from wellposed.certification import certify
from wellposed.nn import AdditiveCoupling, InvertibleResidual

NORMS = ("tok", "inf", 2)


def test_the_shear_is_exact_in_norm_two_and_reached_in_tok():
    """f the identity, g zero: the golden ratio in norm 2; in tok a mean over tokens reaches almost
    1 + L."""
    coupling = AdditiveCoupling(nn.Identity(), nn.Linear(1, 1, bias=False))
    nn.init.zeros_(coupling.g.weight)
    golden = (1 + math.sqrt(5)) / 2
    assert certify(coupling, seq_len=2, norm=2).total == pytest.approx(golden)
    found = lipschitz_lower_bound(coupling, (2, 2), norm=2, steps=3, inner=20)
    assert found.value == pytest.approx(golden, rel=1e-6)


def test_a_bound_that_was_vouched_for_is_called_empirical():
    block = InvertibleResidual(nn.LSTM(2, 2), lipschitz=0.4)
    certificate = certify(block, seq_len=3)
    assert certificate.total == pytest.approx(1.4)
    assert certificate.label == "empirical"
    assert certify(block, seq_len=3, norm=2).total == math.inf


R = 0.6


def diagonal(size, shift):
    linear = nn.Linear(3, 3).double()
    with torch.no_grad():
        linear.weight.copy_(size * torch.eye(3))
        linear.bias.copy_(torch.tensor([shift, 0.0, 0.0]))
    return linear


def shear(size):
    """The largest singular value of [[1, L], [0, 1]]."""
    return float(torch.linalg.matrix_norm(torch.tensor([[1.0, size], [0.0, 1.0]]).double(), 2))


def test_an_additive_coupling():
    model = nn.Sequential(
        AdditiveCoupling(diagonal(2.0, 0.1), diagonal(0.5, 0.3)), nn.Linear(6, 6).double()
    )
    for norm, bound in (("tok", 3.0 * 1.5), ("inf", 3.0 * 1.5), (2, shear(2.0) * shear(0.5))):
        parts = rows(model, norm=norm, radius=R)
        assert parts["0"].lipschitz == pytest.approx(bound, rel=1e-5)
        # (a, b) -> (a + f(b), b) -> (a + f(b), b + g(a + f(b))), each half no longer than R at
        # first.
        middle = R + (2.0 * R + 0.1)
        after = math.hypot(middle, R + 0.5 * middle + 0.3)
        balls = [parts[name].radius for name in ("0.f", "0.g", "1")]
        assert balls == pytest.approx([R, middle, after], rel=1e-5)
    assert certify(model[0], seq_len=3).total == pytest.approx(4.5, rel=1e-5)


def test_a_coupling_of_a_part_without_a_bound_names_it():
    for f, g, name in ((nn.LSTM(3, 3), diagonal(1, 0), "f"), (diagonal(1, 0), nn.LSTM(3, 3), "g")):
        certificate = certify(AdditiveCoupling(f, g), seq_len=3, norm=2)
        assert certificate.total == math.inf
        assert [row.path for row in certificate.uncertified] == [name]
