"""The nearest orthogonal matrix against the polar factor, and the distance from orthogonal."""

import pytest
import torch
from tests.support.refusal import each_refused

from wellposed.errors import ConfigError, ConvergenceError, ShapeError
from wellposed.linalg import isometry_error, nearest_orthogonal


def slow_polar(weight):
    """W (W^T W)^{-1/2} by the eigenvalues of the small Gram matrix, in float64."""
    matrix = weight.double() if weight.shape[0] >= weight.shape[1] else weight.double().T
    values, vectors = torch.linalg.eigh(matrix.T @ matrix)
    result = matrix @ (vectors / values.sqrt()) @ vectors.T
    return result if weight.shape[0] >= weight.shape[1] else result.T


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gain", [1.0, 0.3])
@pytest.mark.parametrize("shape", [(8, 8), (12, 5), (5, 12), (1, 7)])
def test_it_is_the_polar_factor_of_each_matrix(shape, gain, dtype):
    weights = torch.randn(3, *shape).to(dtype)
    found = nearest_orthogonal(weights, gain=gain)
    expected = gain * torch.stack([slow_polar(weight) for weight in weights])
    assert found.dtype == dtype
    # the eigenvalues of a Gram matrix lose half the digits
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=max(unit, 1e-9))
    assert isometry_error(found, gain=gain).shape == (3,)
    assert float(isometry_error(found, gain=gain).max()) <= 20 * unit


def test_isometry_error_is_the_largest_entry():
    weight = torch.randn(6, 4)
    expected = float((weight.double().T @ weight.double() / 4 - torch.eye(4)).abs().max())
    assert float(isometry_error(weight, gain=2.0)) == pytest.approx(expected)
    assert float(isometry_error(weight.T, gain=2.0)) == pytest.approx(expected)


def test_bad_input():
    shapes = {
        r"\(3,\)": lambda: nearest_orthogonal(torch.zeros(3)),
        "int64": lambda: isometry_error(torch.zeros(3, 3).long()),
    }
    each_refused(ShapeError, shapes)
    each_refused(ConfigError, {"gain": lambda: nearest_orthogonal(torch.eye(3), gain=-1.0)})
    broken = {"finite": lambda: nearest_orthogonal(torch.full((2, 2), float("nan")))}
    each_refused(ConvergenceError, broken)
