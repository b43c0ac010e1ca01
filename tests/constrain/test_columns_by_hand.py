"""Columns of a length: what counts as within rounding, what moves, and how far the report says it
moved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from wellposed.constrain import Constraint, constrain_
from wellposed.errors import ConfigError, ConvergenceError


def held(layer: nn.Module, bound: float = 1.0) -> Constraint:
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    return constrain_(nn.Sequential(layer), optimizer, where="0", to="columns", bound=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("units", [1.5, 4.0])
def test_a_column_within_the_rounding_of_its_entries_is_not_touched(
    dtype: torch.dtype, units: float
) -> None:
    """Two units of the dtype, and one of float64 for every entry that is squared and summed: 64
    here."""
    eps = torch.finfo(dtype).eps
    layer = nn.Linear(2, 64, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.fill_(0.125 * (1 + units * eps))
        layer.to(dtype)
    before = layer.weight.detach().clone()
    error = abs(float(before.double()[0, 0]) * 8 - 1)
    row = held(layer).report.rows[0]
    is_near = error <= 2 * eps + 64 * torch.finfo(torch.float64).eps
    assert is_near == (units == 1.5 or dtype == torch.float64)
    assert torch.equal(layer.weight, before) == is_near
    assert row.moved_frobenius == pytest.approx(0.0 if is_near else error / (1 + error), rel=0.01)
    assert row.error_before == pytest.approx(error, rel=1e-3, abs=2e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_attaching_reports(dtype: torch.dtype) -> None:
    layer = nn.Linear(3, 2, bias=False, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[3.0, 0.0, 0.5], [4.0, 2.0, 0.0]]))
    handle = held(layer, 2.0)
    (row,) = handle.report.rows
    expected = torch.tensor([[1.2, 0.0, 2.0], [1.6, 2.0, 0.0]], dtype=dtype)
    torch.testing.assert_close(layer.weight.detach(), expected)
    whole = torch.tensor([[3.0, 0.0, 0.5], [4.0, 2.0, 0.0]], dtype=dtype)
    moved = expected - whole
    assert row.shape == (2, 3)
    assert row.gain == 2.0
    assert row.moved_frobenius == pytest.approx(float(moved.norm() / whole.norm()))
    sizes = [float(torch.linalg.matrix_norm(part.double(), 2)) for part in (moved, whole)]
    assert row.moved_spectral == pytest.approx(sizes[0] / sizes[1])
    assert row.error_before == pytest.approx(1.5)
    assert row.error_after <= 1e-7
    with torch.no_grad():
        layer.weight[:, 1] *= 1.25
    assert handle.error().worst == pytest.approx(0.25, rel=1e-5)
    layer.weight.grad = torch.zeros_like(layer.weight)
    handle.weights[0].optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), expected)


@pytest.mark.parametrize("batched", [False, True])
def test_columns_that_a_step_takes_to_zero_are_counted(batched: bool) -> None:
    layers = nn.ModuleList(nn.Linear(4, 3, bias=False) for _ in range(2))
    optimizer = torch.optim.SGD(layers.parameters(), lr=1.0)
    constrain_(layers, optimizer, where=nn.Linear, to="columns", batched=batched)
    for layer in layers:
        layer.weight.grad = torch.zeros_like(layer.weight)
    gradient = layers[1].weight.grad
    assert gradient is not None
    gradient[:, 1:3] = layers[1].weight.detach()[:, 1:3]
    with pytest.raises(
        ConvergenceError, match=r"1\.weight: 2 of 4 columns are zero or not finite .*: \[1, 2\]"
    ):
        optimizer.step()


def test_a_vector_of_padding_may_be_zero_or_have_the_length() -> None:
    for vector in (0.0, 3.0):
        table = nn.Embedding(4, 3, padding_idx=2)
        with torch.no_grad():
            table.weight[2] = vector
        handle = held(table, 0.5)
        lengths = table.weight.detach().norm(dim=1)
        expected = [0.5, 0.5, 0.5 if vector else 0.0, 0.5]
        assert lengths.tolist() == pytest.approx(expected, abs=1e-6)
        assert handle.error().worst <= 1e-6
    table = nn.Embedding(4, 3, padding_idx=2)
    with torch.no_grad():
        table.weight[1] = 0.0
    with pytest.raises(ConfigError, match="1 zero columns, the first at 1"):
        held(table)
