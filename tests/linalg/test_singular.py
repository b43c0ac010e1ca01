"""Singular values against matrices built from known ones, and Lanczos from below."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wellposed.errors import ConfigError, ConvergenceError, ShapeError
from wellposed.linalg import largest_singular_value, singular_values

WIDTH = 256


def with_spectrum(values, rows, cols, seed=0):
    """A float64 matrix whose singular values are ``values``."""
    generator = torch.Generator().manual_seed(seed)
    count = len(values)
    left = torch.linalg.qr(torch.randn(rows, count, generator=generator, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(cols, count, generator=generator, dtype=torch.float64))[0]
    return (left * values.double()) @ right.T


def spectra(size=WIDTH):
    index = torch.arange(1, size + 1, dtype=torch.float64)
    noise = torch.rand(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gaussian = torch.randn(size, size, generator=torch.Generator().manual_seed(2)).double()
    return {
        "gaussian": torch.linalg.svdvals(gaussian),
        "pair at the top": torch.where(index < 3, 1.0001 - 1e-4 * index, 0.9 * (1 - index / size)),
        "power law": 8 * index**-0.5,
        "flat top": (1 - (index - 1) / size).sqrt(),
        "near-orthogonal": 1 + 0.03 * (2 * noise - 1),
        "nearer orthogonal": 1 + 1e-3 * (2 * noise - 1),
        "fast decay": torch.exp(-index / 20),
    }


@pytest.mark.parametrize(("rows", "cols"), [(5, 5), (9, 4), (4, 9), (1, 7), (7, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_all_singular_values(rows, cols, dtype):
    weight = torch.randn(rows, cols).to(dtype)
    wide = weight.double() if rows <= cols else weight.double().T
    gram = wide @ wide.T
    expected = np.sqrt(np.maximum(np.linalg.eigvalsh(gram.numpy()), 0))[::-1]
    values = singular_values(weight)
    assert values.dtype == torch.float64
    # the square root of an eigenvalue of the Gram matrix has half the digits of float64
    np.testing.assert_allclose(values.numpy(), expected, atol=1e-7 * expected[0])


@pytest.mark.parametrize("name", spectra())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lanczos_is_a_lower_estimate_within_its_tolerance(name, dtype):
    values = spectra()[name]
    true = values.max().item()
    weight = with_spectrum(values, WIDTH, WIDTH).to(dtype)
    value = largest_singular_value(weight)
    rounding = 100 * torch.finfo(dtype).eps
    assert value <= true * (1 + rounding)
    # The tolerance is 1e-3; its own estimate of the error is one of order.
    assert 1 - value / true <= 1.5e-3


def test_no_digits_are_lost_in_many_steps_on_orthogonal_weights(monkeypatch):
    """A single Gram-Schmidt pass reports 90 for this matrix of norm 1.001."""
    monkeypatch.setattr("wellposed.linalg._singular.TOLERANCE", 1e-7)
    weight = with_spectrum(spectra()["nearer orthogonal"], 2 * WIDTH, WIDTH).float()
    value = largest_singular_value(weight)
    assert value == pytest.approx(spectra()["nearer orthogonal"].max().item(), rel=2e-6)


def test_ends_in_the_svd_where_lanczos_does_not_reach_the_tolerance(monkeypatch):
    monkeypatch.setattr("wellposed.linalg._singular.TOLERANCE", 0.0)
    values = torch.linspace(1, 1 + 1e-9, WIDTH, dtype=torch.float64)
    values += torch.linspace(0, 0.2, WIDTH).double() ** 2
    largest = largest_singular_value(with_spectrum(values, WIDTH, WIDTH))
    assert largest == pytest.approx(values.max().item(), rel=1e-13)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 30),
    cols=st.integers(1, 30),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e3, 1e30]),
    seed=st.integers(0, 1000),
)
def test_small_matrices_of_any_shape_and_scale(rows, cols, scale, seed):
    weight = scale * torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    true = np.linalg.norm(weight.double().numpy(), 2)
    value = largest_singular_value(weight)
    assert value <= true * (1 + 1e-5)
    assert value >= true * (1 - 2e-3)


def test_same_number_every_time_and_the_random_state_is_untouched():
    weight = torch.randn(100, 80, requires_grad=True)
    state = torch.get_rng_state()
    first = largest_singular_value(weight)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert largest_singular_value(weight) == first
    assert not singular_values(weight).requires_grad


@pytest.mark.parametrize("function", [singular_values, largest_singular_value])
def test_bad_input(function):
    with pytest.raises(ShapeError, match=r"\(3,\)"):
        function(torch.ones(3))
    with pytest.raises(ShapeError, match=r"\(0, 4\)"):
        function(torch.ones(0, 4))
    with pytest.raises(ConfigError, match="int8"):
        function(torch.ones(3, 3, dtype=torch.int8))
    with pytest.raises(ConvergenceError, match=r"\(3, 2\) holds 2 NaN"):
        function(torch.tensor([[1.0, math.nan], [0.0, 1.0], [math.inf, 1.0]]))


SIZE = 60


@pytest.mark.parametrize("exponent", [-300, -13, -11, 0, 11, 13, 300])
def test_the_scale_is_taken_out_where_squares_would_leave_float32(exponent):
    weight = with_spectrum(spectra(SIZE)["flat top"], SIZE, SIZE)
    scaled = largest_singular_value(weight * 10.0**exponent)
    expected = largest_singular_value(weight) * 10.0**exponent
    assert scaled == pytest.approx(expected, rel=1e-9)
    assert largest_singular_value(torch.zeros(3, 4)) == 0.0


def test_few_different_values_end_early_and_exact():
    row = torch.randn(1, 9)
    for matrix, expected in (
        (3 * torch.eye(7), 3.0),
        (torch.diag(torch.tensor([3.0, 3.0, 1.0, 1.0, 1.0])), 3.0),
        (row, float(row.norm())),
        (row.T, float(row.norm())),
    ):
        assert largest_singular_value(matrix) == pytest.approx(expected, rel=1e-6)
