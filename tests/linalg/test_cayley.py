"""The Cayley map: orthonormal columns, analytic gradient, inverse, reach."""

import pytest
import torch

from wellposed.errors import ConvergenceError, ShapeError
from wellposed.linalg import based_cayley, cayley, inverse_cayley

SHAPES = [(1, 1), (6, 6), (9, 4), (5, 1), (7, 6)]


def slow_cayley(free):
    """The definition: build the full skew matrix, solve, keep the first columns."""
    rows, columns = free.shape
    full = torch.zeros(rows, rows, dtype=torch.float64)
    full[:, :columns] = free.double()
    skew = full - full.T
    identity = torch.eye(rows, dtype=torch.float64)
    return torch.linalg.solve(identity - skew / 2, identity + skew / 2)[:, :columns]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_it_is_the_definition(shape, scale):
    free = scale * torch.randn(shape, dtype=torch.float64)
    assert torch.allclose(cayley(free), slow_cayley(free), atol=1e-9)


@pytest.mark.parametrize("shape", [(64, 64), (96, 40)])
def test_float32_is_orthonormal(shape):
    value = cayley(torch.randn(shape) / shape[1] ** 0.5).double()
    assert float((value.T @ value - torch.eye(shape[1], dtype=torch.float64)).abs().max()) < 5e-6


@pytest.mark.parametrize("shape", SHAPES)
def test_gradient(shape):
    free = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(cayley, (free,))
    if shape[0] == shape[1]:
        base = torch.linalg.qr(torch.randn(shape, dtype=torch.float64))[0]
        assert torch.allclose(based_cayley(free, base), base @ slow_cayley(free.detach()))
        assert torch.autograd.gradcheck(lambda x: based_cayley(x, base), (free,))


@pytest.mark.parametrize("shape", SHAPES)
def test_inverse(shape):
    value = cayley(torch.randn(shape, dtype=torch.float64))
    assert torch.allclose(cayley(inverse_cayley(value)), value)


def test_reflections_are_out_of_reach_without_a_base():
    mirror = torch.diag(torch.tensor([1.0, -1.0]))
    with pytest.raises(ConvergenceError, match="use a base"):
        inverse_cayley(mirror)
    assert float(torch.linalg.det(based_cayley(torch.randn(2, 2), mirror))) == pytest.approx(-1.0)


def test_shapes():
    for bad in (torch.zeros(2, 3), torch.zeros(3), torch.zeros(1, 3, 3)):
        with pytest.raises(ShapeError):
            cayley(bad)
    with pytest.raises(ShapeError):
        based_cayley(torch.zeros(3, 3), torch.eye(2))
