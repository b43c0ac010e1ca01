"""The nearest orthogonal matrix against the polar factor, and the distance from orthogonal."""

import pytest
import torch
from tests.support.launches import Launches

from wellposed.errors import ConfigError, ConvergenceError, ShapeError
from wellposed.linalg import isometry_error, nearest_orthogonal, polar_factors

# Roundings of float32, of a matrix whose singular values span a factor of 18 after the first step.
PRODUCTS = 16 * torch.finfo(torch.float32).eps


def slow_polar(weight):
    left, _, right = torch.linalg.svd(weight.double(), full_matrices=False)
    return left @ right


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gain", [1.0, 0.3])
@pytest.mark.parametrize("shape", [(8, 8), (12, 5), (5, 12), (1, 7), (300, 300)])
def test_it_is_the_polar_factor_of_each_matrix(shape, gain, dtype):
    weights = torch.randn(3, *shape).to(dtype)
    nearest = nearest_orthogonal(weights, gain=gain)
    expected = gain * slow_polar(weights)
    assert nearest.dtype == dtype
    unit = torch.finfo(dtype).eps
    off = torch.linalg.matrix_norm(nearest.double() - expected, 2) / gain
    rounding = unit + (max(shape) * unit if dtype == torch.float64 else PRODUCTS)
    assert float(off.max()) <= rounding
    assert isometry_error(nearest, gain=gain).shape == (3,)
    assert float(isometry_error(nearest, gain=gain).max()) <= 20 * unit


def spectrum_of(kind, columns=40):
    """Singular values from 1 down."""
    values = torch.linspace(1.0, 0.5, columns, dtype=torch.float64)
    values[-3:] = {"singular": 0.0, "tiny": 1e-30}.get(kind, 1.0)
    if kind.startswith("1e"):
        values = torch.logspace(0.0, -float(kind[2:]), columns, dtype=torch.float64)
    return values


KINDS = ("flat", "1e2", "1e4", "1e5", "1e6", "1e7", "singular", "tiny")


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_conditions_of_any_size_in_one_stack(scale):
    stack = []
    for kind in KINDS:
        left, right = (slow_polar(torch.randn(size, 40, dtype=torch.float64)) for size in (60, 40))
        stack.append(((left * spectrum_of(kind)) @ right.T * scale).float())
    factors = polar_factors(torch.stack(stack))
    assert factors.dtype == torch.float64
    assert float(isometry_error(factors).max()) <= 1e-6
    for weight, factor in zip(stack, factors, strict=True):
        values = torch.linalg.svdvals(weight.double())
        # of a singular matrix many are the nearest: each at the distance of singular values from 1
        away = torch.linalg.matrix_norm(factor - weight.double() / scale)
        distance = torch.linalg.vector_norm(values / scale - 1.0)
        assert float(away) == pytest.approx(float(distance), rel=PRODUCTS)
    for index, condition in enumerate((1.0, 1e2, 1e4, 1e5)):
        off = torch.linalg.matrix_norm(factors[index] - slow_polar(stack[index]), 2)
        # the Gram matrix of the first step squares the condition
        assert float(off) <= PRODUCTS + condition**2 * torch.finfo(torch.float64).eps


def test_a_stack_takes_as_many_launches_and_one_read_as_a_matrix():
    counts = []
    for size in (1, 9):
        with Launches() as launches:
            polar_factors(torch.randn(size, 32, 16))
        counts.append((launches.total, launches.reads))
    assert counts[0] == counts[1]
    assert counts[0][1] == 1


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
    for message, call in shapes.items():
        with pytest.raises(ShapeError, match=message):
            call()
    with pytest.raises(ConfigError, match="gain"):
        nearest_orthogonal(torch.eye(3), gain=-1.0)
    broken = {"finite": lambda: nearest_orthogonal(torch.full((2, 2), float("nan")))}
    for message, call in broken.items():
        with pytest.raises(ConvergenceError, match=message):
            call()
