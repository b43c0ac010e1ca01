"""Entropy and sensitivity of softmax rows against slow float64 loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wellposed.errors import ShapeError
from wellposed.functional import attention_entropy, softmax_sensitivity


def entropy_reference(row):
    return -sum(p * math.log(p) for p in row if p > 0)


def jacobian_norm(row):
    """2-norm of diag p - p p^T in float64, the diagonal from sums so that p near 1 keeps its
    digits."""
    jacobian = -torch.outer(row, row)
    for i in range(len(row)):
        jacobian[i, i] = row[i] * (row[:i].sum() + row[i + 1 :].sum())
    return torch.linalg.eigvalsh(jacobian).abs().max().item()


def test_entropy():
    probabilities = torch.softmax(3 * torch.randn(2, 3, 4, 7, dtype=torch.float64), -1)
    probabilities[0, 0, 0] = torch.tensor([0.0, 1, 0, 0, 0, 0, 0])
    actual = attention_entropy(probabilities)
    assert actual.shape == (2, 3, 4)
    expected = [entropy_reference(row) for row in probabilities.reshape(-1, 7).tolist()]
    assert actual.flatten().tolist() == pytest.approx(expected, abs=1e-13)
    assert actual[0, 0, 0] == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.sampled_from([1e-3, 1.0, 10.0, 100.0]), st.integers(0, 1000))
def test_sensitivity_bounds_the_jacobian(keys, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, keys, generator=generator, dtype=torch.float64)
    probabilities = (scale * logits).softmax(-1)
    actual = softmax_sensitivity(probabilities)
    for row, bound in zip(probabilities, actual.tolist(), strict=True):
        assert jacobian_norm(row) <= bound * (1 + 1e-12) + 1e-300
        assert bound <= 0.5 * (1 + 1e-12)


def test_sensitivity_is_reached_where_the_others_are_equal():
    for first in (0.3, 0.5, 0.9, 1 - 1e-9):
        row = torch.tensor([first, *[(1 - first) / 4] * 4], dtype=torch.float64)
        assert softmax_sensitivity(row[None]).item() == pytest.approx(jacobian_norm(row), rel=1e-9)
    saturated = torch.tensor([[1.0, 1e-20, 5e-21]], dtype=torch.float64)
    assert softmax_sensitivity(saturated).item() == pytest.approx(2.5e-20, rel=1e-9)


def test_half_precision_is_computed_in_float32():
    probabilities = torch.softmax(torch.randn(4, 9), -1).bfloat16()
    assert attention_entropy(probabilities).dtype == torch.float32
    assert softmax_sensitivity(probabilities).dtype == torch.float32


@pytest.mark.parametrize("function", [attention_entropy, softmax_sensitivity])
def test_no_key_is_refused(function):
    with pytest.raises(ShapeError, match=r"received \(3, 0\)"):
        function(torch.ones(3, 0))
