"""The polar factor against the SVD, its gradient, and the nearest orthogonal matrix."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.refusal import each_refused

from wellposed.errors import ConfigError, ConvergenceError, ShapeError
from wellposed.linalg import isometry_error, nearest_orthogonal, newton_schulz_, polar


def slow_polar(weight):
    """W (W^T W)^{-1/2} by the eigenvalues of the small Gram matrix, in float64."""
    matrix = weight.double() if weight.shape[0] >= weight.shape[1] else weight.double().T
    values, vectors = torch.linalg.eigh(matrix.T @ matrix)
    result = matrix @ (vectors / values.sqrt()) @ vectors.T
    return result if weight.shape[0] >= weight.shape[1] else result.T


def spread(rows, columns, low, high):
    small = min(rows, columns)
    left = torch.linalg.qr(torch.randn(rows, small, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(columns, small, dtype=torch.float64))[0]
    return left @ torch.diag(torch.linspace(low, high, small, dtype=torch.float64)) @ right.T


@pytest.mark.parametrize("method", ["auto", "newton_schulz", "svd"])
@pytest.mark.parametrize("shape", [(8, 8), (12, 5), (5, 12)])
@pytest.mark.parametrize("low", [0.95, 0.05])
def test_every_method_finds_the_polar_factor(method, shape, low):
    weight = spread(*shape, low, 1.05)
    found = polar(weight, method=method)
    assert torch.allclose(found, slow_polar(weight), atol=1e-10)
    found = polar(weight.float(), method=method)
    assert float(isometry_error(found)) <= 2e-6
    assert torch.allclose(found.double(), slow_polar(weight), atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(
    scale=st.floats(1e-3, 1e3),
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    seed=st.integers(0, 999),
)
def test_scale_does_not_matter(scale, rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    if float(torch.linalg.svdvals(weight)[-1]) < 1e-2:
        return
    for method in ("auto", "newton_schulz", "svd"):
        assert torch.allclose(polar(scale * weight, method=method), slow_polar(weight), atol=1e-7)


@pytest.mark.parametrize("shape", [(5, 5), (7, 4), (4, 7)])
def test_gradient(shape):
    weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(polar, (weight,))


def test_batches():
    weights = torch.stack([spread(6, 4, 0.9, 1.1) for _ in range(3)])
    assert torch.allclose(polar(weights), torch.stack([slow_polar(weight) for weight in weights]))
    assert isometry_error(weights).shape == (3,)


def test_isometry_error_is_the_largest_entry():
    weight = torch.randn(6, 4)
    expected = float((weight.double().T @ weight.double() / 4 - torch.eye(4)).abs().max())
    assert float(isometry_error(weight, gain=2.0)) == pytest.approx(expected)
    assert float(isometry_error(weight.T, gain=2.0)) == pytest.approx(expected)


def test_newton_schulz_counts_its_steps_and_stops_at_tolerance():
    weight = spread(10, 10, 0.95, 1.05)
    loose, tight = weight.clone(), weight.clone()
    assert newton_schulz_(loose, tolerance=1e-2) < newton_schulz_(tight, tolerance=1e-12)
    assert float(isometry_error(loose)) <= 1e-2
    assert float(isometry_error(tight)) <= 1e-12
    assert newton_schulz_(tight, tolerance=1e-11) == 0


def test_half_precision_is_rounded_once():
    weight = spread(8, 8, 0.9, 1.1).to(torch.bfloat16)
    assert torch.equal(polar(weight), polar(weight.float()).to(torch.bfloat16))


@pytest.mark.parametrize("gain", [1.0, 0.3])
def test_nearest_orthogonal_is_nearer_than_any_other(gain):
    weight = torch.randn(5, 5, dtype=torch.float64)
    found = nearest_orthogonal(weight, gain=gain)
    assert float(isometry_error(found.weight, gain=gain)) < 1e-12
    distance = (found.weight - weight).norm()
    assert found.moved_frobenius == pytest.approx(float(distance / weight.norm()))
    for _ in range(50):
        other = gain * torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))[0]
        assert (other - weight).norm() >= distance
        small = 0.05 * torch.randn(5, 5, dtype=torch.float64)
        near = found.weight @ torch.matrix_exp(small - small.T)
        assert (near - weight).norm() >= distance


def test_fitted_gain_beats_its_neighbours():
    weight = torch.randn(6, 4)
    fitted = nearest_orthogonal(weight, gain="fit")
    for factor in (0.95, 1.05):
        other = nearest_orthogonal(weight, gain=factor * fitted.gain)
        assert other.moved_frobenius > fitted.moved_frobenius


def test_bad_input():
    zero = torch.zeros(3, 3)
    shapes = {
        r"\(3,\)": lambda: polar(torch.zeros(3)),
        "int64": lambda: isometry_error(zero.long()),
        "bfloat16": lambda: newton_schulz_(torch.eye(3, dtype=torch.bfloat16)),
        r"\(2, 3, 3\)": lambda: nearest_orthogonal(torch.zeros(2, 3, 3)),
    }
    each_refused(ShapeError, shapes)
    words = {
        "qr": lambda: polar(torch.eye(2), method="qr"),
        "gain": lambda: nearest_orthogonal(torch.eye(3), gain=-1.0),
    }
    each_refused(ConfigError, words)
    numbers = {
        "finite": lambda: polar(torch.full((2, 2), float("nan"))),
        "sqrt 3": lambda: newton_schulz_(5 * torch.eye(3)),
        "zero": lambda: nearest_orthogonal(zero, gain="fit"),
    }
    each_refused(ConvergenceError, numbers)
    with pytest.raises(ConvergenceError):
        polar(zero, method="newton_schulz")
