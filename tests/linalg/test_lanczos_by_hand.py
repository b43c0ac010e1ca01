"""Lanczos' value, error estimate and stop, against the Krylov space spelled out with a QR
factorisation each time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from wellposed.errors import ConfigError
from wellposed.linalg import lanczos_singular_value, largest_singular_value

SIZE = 60
SPECTRA: dict[str, Tensor] = {
    "flat top": (1 - torch.arange(SIZE).double() / SIZE).sqrt(),
    "power law": torch.arange(1, SIZE + 1).double() ** -0.5,
    "near-orthogonal": 1 + 0.03 * torch.linspace(-1, 1, SIZE).double(),
    "pair at the top": torch.cat(
        [torch.tensor([1.0, 0.9999]).double(), torch.linspace(0.9, 0, SIZE - 2).double()]
    ),
}


def matrix(name: str, rows: int = SIZE) -> Tensor:
    generator = torch.Generator().manual_seed(len(name))
    left = torch.linalg.qr(torch.randn(rows, SIZE, generator=generator, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64))[0]
    return (left * SPECTRA[name]) @ right.T


def krylov(weight: Tensor, steps: int) -> Tensor:
    """Orthonormal columns that span v, (W^T W) v, ..., one new one at a time."""
    start = torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(20210)).double()
    basis = (start / start.norm())[:, None]
    for _ in range(steps - 1):
        basis = torch.linalg.qr(torch.cat([basis, (weight.T @ (weight @ basis[:, -1:]))], 1))[0]
    return basis


def estimate(weight: Tensor, steps: int) -> tuple[float, float]:
    """The largest Ritz value, and: the less of its growth since half the steps, and of r^2 / gap or
    r."""
    left, values, right = torch.linalg.svd(
        weight @ (basis := krylov(weight, steps)), full_matrices=False
    )
    value = float(values[0])
    residual = float((weight.T @ left[:, 0] - value * (basis @ right[0])).norm()) / value
    gap = 1 - float(values[1]) / value
    growth, recent = (
        1 - float(torch.linalg.svdvals(weight @ basis[:, :count])[0]) / value
        for count in (steps // 2, steps - 4)
    )
    return value, min(growth, max(min(residual**2 / gap, residual), 2 * recent))


@pytest.mark.parametrize("rows", [SIZE, 90])
@pytest.mark.parametrize("tol", [1e-2, 1e-3, 1e-5])
@pytest.mark.parametrize("name", SPECTRA)
def test_it_stops_at_the_first_check_whose_error_is_below_the_tolerance(
    name: str, tol: float, rows: int
) -> None:
    weight = matrix(name, rows)
    found = lanczos_singular_value(weight, tol=tol)
    if found.steps == SIZE:
        assert found.value == pytest.approx(float(SPECTRA[name].max()), rel=1e-12)
        assert found.error == 0.0
    else:
        value, error = estimate(weight, found.steps)
        assert found.value == pytest.approx(value, rel=1e-12)
        assert found.error == pytest.approx(error, rel=1e-4, abs=1e-13)
        assert found.error < tol
        assert found.steps % 4 == 0
    earlier = range(16, found.steps, 4)
    assert all(estimate(weight, steps)[1] >= tol * (1 - 1e-6) for steps in earlier)
    assert found.steps >= 16


@pytest.mark.parametrize("exponent", [-300, -13, -11, 0, 11, 13, 300])
def test_the_scale_is_taken_out_where_squares_would_leave_float32(exponent: int) -> None:
    weight = matrix("flat top")
    scaled = lanczos_singular_value(weight * 10.0**exponent)
    assert scaled.value == pytest.approx(
        lanczos_singular_value(weight).value * 10.0**exponent, rel=1e-9
    )
    assert lanczos_singular_value(torch.zeros(3, 4)) == (0.0, 0.0, 0)


def test_one_and_two_values_end_after_as_many_steps() -> None:
    assert lanczos_singular_value(3 * torch.eye(7)).steps == 1
    two = lanczos_singular_value(torch.diag(torch.tensor([3.0, 3.0, 1.0, 1.0, 1.0])))
    assert two.steps == 2
    assert two.value == pytest.approx(3.0, rel=1e-6)
    assert two.error == 0.0
    row = torch.randn(1, 9)
    assert lanczos_singular_value(row).value == pytest.approx(float(row.norm()), rel=1e-6)
    assert lanczos_singular_value(row.T).value == pytest.approx(float(row.norm()), rel=1e-6)


def test_tolerances_that_are_none() -> None:
    for tol in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match="positive relative error"):
            largest_singular_value(torch.eye(2), tol=tol)
