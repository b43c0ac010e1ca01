"""Tangent projections against their definitions; retractions against the exponential and the polar
factor."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from wellposed.errors import ConvergenceError, ShapeError
from wellposed.linalg import (
    Workspace,
    isometry_error,
    retract_,
    rotate,
    skew_gradient_,
    tangent_gradient_,
)


def isometry(rows: int, columns: int, gain: float = 1.0) -> Tensor:
    return gain * torch.linalg.qr(torch.randn(rows, columns, dtype=torch.float64))[0]


def skew(columns: int, size: float) -> Tensor:
    matrix = torch.randn(columns, columns, dtype=torch.float64)
    matrix = matrix - matrix.T
    return matrix * (size / torch.linalg.matrix_norm(matrix, 2))


@pytest.mark.parametrize("gain", [1.0, 0.5])
def test_skew_gradient_is_the_derivative_along_the_group(gain: float) -> None:
    point, target = isometry(6, 6, gain), torch.randn(6, 6, dtype=torch.float64)
    coordinates = torch.zeros(6, 6, dtype=torch.float64, requires_grad=True)
    moved = point @ torch.matrix_exp((coordinates - coordinates.T) / 2 / gain)
    ((moved - target) ** 3).sum().backward()
    gradient = 3 * (point - target) ** 2
    assert coordinates.grad is not None
    assert torch.allclose(skew_gradient_(point, gradient, gain=gain), coordinates.grad)


@pytest.mark.parametrize("gain", [1.0, 0.5])
@pytest.mark.parametrize("shape", [(7, 4), (5, 5)])
def test_tangent_gradient_is_the_orthogonal_projection(shape: tuple[int, int], gain: float) -> None:
    point, gradient = isometry(*shape, gain), torch.randn(shape, dtype=torch.float64)
    tangent = tangent_gradient_(point, gradient.clone(), gain=gain)
    inner = point.T @ tangent
    assert torch.allclose(inner + inner.T, torch.zeros_like(inner), atol=1e-12)
    # What was taken away is normal: orthogonal to every tangent vector.
    for _ in range(5):
        other = tangent_gradient_(point, torch.randn(shape, dtype=torch.float64), gain=gain)
        assert float(((gradient - tangent) * other).sum()) == pytest.approx(0.0, abs=1e-10)


@pytest.mark.parametrize("gain", [1.0, 2.0])
@pytest.mark.parametrize(
    ("size", "tolerance", "method"),
    [
        (0.05, 1e-5, "corrected"),
        (0.3, 1e-5, "corrected"),
        (0.7, 1e-5, "newton_schulz"),
        (0.1, 1e-11, "newton_schulz"),
        (2.5, 1e-11, "exponential"),
    ],
)
def test_rotate_follows_the_exponential(
    size: float, tolerance: float, method: str, gain: float
) -> None:
    point, step = isometry(16, 16, gain), skew(16, size) * gain
    noise = torch.randn(16, 16, dtype=torch.float64)
    out = torch.empty_like(point)
    # The symmetric part of the step is ignored.
    taken = rotate(point, step + noise + noise.T, out=out, gain=gain, tolerance=tolerance)
    same = torch.empty_like(point)
    rotate(point, step.clone(), out=same, gain=gain, tolerance=tolerance, step_is_skew=True)
    assert torch.allclose(same, out, atol=1e-13)
    assert taken.method == method
    assert float(isometry_error(out, gain=gain)) <= tolerance
    exact = point @ torch.matrix_exp(step / gain)
    limit = 1e-10 if method == "exponential" else 0.5 * size**3
    assert float(torch.linalg.matrix_norm((out - exact) / gain, 2)) <= limit
    assert math.isnan(taken.size) or taken.size >= size * (1 - 1e-12)


@pytest.mark.parametrize(("size", "method"), [(0.07, "quadratic"), (0.2, "cubic")])
@pytest.mark.parametrize("columns", [32, 300])
def test_steps_measure_their_error_only_now_and_then_and_stay_within_tolerance(
    size: float, method: str, columns: int
) -> None:
    point, drift, methods = isometry(columns, columns).float(), None, []
    step = skew(columns, size).float()
    for _ in range(60 if columns < 256 else 15):
        out = step.clone()  # the result may take the memory of the step
        taken = rotate(point, out, out=out, drift=drift, step_is_skew=True)
        methods.append(taken.method)
        assert (
            float(isometry_error(out)) <= taken.drift + 1e-6
        )  # the bound holds in exact arithmetic
        point, drift = out, taken.drift
    assert methods[0] == "corrected"
    assert methods.count("corrected") < methods.count(method)
    worst_run = max(
        len(run) for run in "".join(" " if m == "corrected" else "q" for m in methods).split()
    )
    assert worst_run <= 17


@pytest.mark.parametrize(("size", "degree"), [(0.05, 2), (0.3, 3)])
def test_the_polynomials_leave_the_defects_they_are_known_for(size: float, degree: int) -> None:
    step = skew(16, size)
    out = torch.empty_like(step)
    # A tolerance this wide leaves the defect as it is; the drift says that the point is perfect.
    taken = rotate(torch.eye(16, dtype=torch.float64), step, out=out, drift=0.0, tolerance=1e-5)
    assert taken.method == ("quadratic", "cubic")[degree - 2]
    power = torch.linalg.matrix_power(step, 2 * degree)
    defect = power / 4 if degree == 2 else -power / 64
    assert torch.allclose(out.T @ out - torch.eye(16), defect, atol=1e-14)
    assert float(defect.abs().max()) <= taken.drift


def test_rotate_heals_a_point_that_drifted() -> None:
    point = isometry(12, 12)
    for drift, limit in ((1e-6, 1e-5), (1e-3, 1e-5), (0.2, 1e-5), (3.0, 1e-5)):
        out = torch.empty_like(point)
        rotate(point + drift * torch.randn_like(point), skew(12, 0.05), out=out, tolerance=limit)
        assert float(isometry_error(out)) <= limit


@pytest.mark.parametrize("size", [1e-3, 0.1, 0.5, 5.0])
@pytest.mark.parametrize("gain", [1.0, 0.5])
def test_retract_is_the_polar_factor(size: float, gain: float) -> None:
    step = torch.randn(14, 6, dtype=torch.float64)
    weight = isometry(14, 6, gain) + gain * size * step / torch.linalg.matrix_norm(step, 2)
    left, _, right = torch.linalg.svd(weight, full_matrices=False)
    taken = retract_(weight, gain=gain, tolerance=1e-9)
    assert float(isometry_error(weight, gain=gain)) <= 1e-9
    assert torch.allclose(weight, gain * left @ right, atol=1e-8)
    assert (taken.method == "svd") == (size > 1.0)


def test_batches_equal_single_matrices() -> None:
    points = torch.stack([isometry(8, 8) for _ in range(3)])
    steps = torch.stack([skew(8, 0.2) for _ in range(3)])
    together = torch.empty_like(points)
    rotate(points, steps.clone(), out=together)
    for point, step, expected in zip(points, steps, together, strict=True):
        out = torch.empty_like(point)
        rotate(point, step, out=out)
        assert torch.allclose(out, expected, atol=1e-5)
    tall = torch.stack([isometry(9, 4) + 0.05 for _ in range(3)])
    single = [matrix.clone() for matrix in tall]
    retract_(tall)
    for matrix, expected in zip(single, tall, strict=True):
        retract_(matrix)
        assert torch.allclose(matrix, expected, atol=1e-5)


@pytest.mark.parametrize("columns", [256, 300, 1100])
def test_large_matrices_are_worked_on_in_panels_with_the_same_result(columns: int) -> None:
    point, step = torch.eye(columns), torch.randn(columns, columns)
    step = (step - step.T) * (0.3 / (8 * columns) ** 0.5)
    out = torch.empty_like(point)
    rotate(point, step, out=out, step_is_skew=True, drift=0.0)
    wide = step.double()
    expected = torch.eye(columns) + wide + wide @ wide / 2 + wide @ wide @ wide / 8
    assert torch.allclose(out.double(), expected, atol=1e-6)


def test_a_workspace_changes_no_result() -> None:
    work = Workspace()
    for _ in range(2):
        point, step = isometry(10, 10), skew(10, 0.3)
        first, second = torch.empty_like(point), torch.empty_like(point)
        rotate(point, step.clone(), out=first)
        rotate(point, step, out=second, workspace=work)
        assert torch.equal(first, second)


def test_not_finite() -> None:
    point, out = isometry(4, 4), torch.zeros(4, 4, dtype=torch.float64)
    with pytest.raises(ConvergenceError, match="not finite"):
        rotate(point, torch.full((4, 4), math.nan, dtype=torch.float64), out=out)
    assert torch.equal(out, point)
    with pytest.raises(ConvergenceError, match="not finite"):
        retract_(torch.full((4, 2), math.inf))


def test_shapes() -> None:
    with pytest.raises(ShapeError, match="square"):
        skew_gradient_(torch.eye(3, 2), torch.eye(3, 2))
    with pytest.raises(ShapeError, match="rows >= columns"):
        retract_(torch.eye(2, 3))
    with pytest.raises(ShapeError):
        tangent_gradient_(torch.eye(3, 2), torch.eye(3))
