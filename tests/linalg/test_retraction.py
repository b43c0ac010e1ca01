"""Tangent projections against their definitions; retractions against the exponential and the polar
factor."""

import math

import pytest
import torch

from wellposed.errors import ConvergenceError, ShapeError
from wellposed.linalg import isometry_error, retract_, rotate, skew_gradient_, tangent_gradient_


def isometry(rows, columns, gain=1.0):
    return gain * torch.linalg.qr(torch.randn(rows, columns, dtype=torch.float64))[0]


def skew(columns, size):
    matrix = torch.randn(columns, columns, dtype=torch.float64)
    matrix = matrix - matrix.T
    return matrix * (size / torch.linalg.matrix_norm(matrix, 2))


@pytest.mark.parametrize("gain", [1.0, 0.5])
def test_skew_gradient_is_the_derivative_along_the_group(gain):
    point = isometry(6, 6, gain)
    target = torch.randn(6, 6, dtype=torch.float64)
    coordinates = torch.zeros(6, 6, dtype=torch.float64, requires_grad=True)
    moved = point @ torch.matrix_exp((coordinates - coordinates.T) / 2 / gain)
    ((moved - target) ** 3).sum().backward()
    gradient = 3 * (point - target) ** 2
    assert coordinates.grad is not None
    assert torch.allclose(skew_gradient_(point, gradient, gain=gain), coordinates.grad)


@pytest.mark.parametrize("gain", [1.0, 0.5])
@pytest.mark.parametrize("shape", [(7, 4), (5, 5)])
def test_tangent_gradient_is_the_orthogonal_projection(shape, gain):
    point = isometry(*shape, gain)
    gradient = torch.randn(shape, dtype=torch.float64)
    tangent = tangent_gradient_(point, gradient.clone(), gain=gain)
    inner = point.T @ tangent
    assert torch.allclose(inner + inner.T, torch.zeros_like(inner), atol=1e-12)
    # The removed part is normal: orthogonal to every tangent vector.
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
def test_rotate_follows_the_exponential(size, tolerance, method, gain):
    point = isometry(16, 16, gain)
    step = skew(16, size) * gain
    noise = torch.randn(16, 16, dtype=torch.float64)
    out = torch.empty_like(point)
    # The symmetric part of the step is ignored.
    taken = rotate(point, step + noise + noise.T, out=out, gain=gain, tolerance=tolerance)
    same = torch.empty_like(point)
    rotate(point, step.clone(), out=same, gain=gain, tolerance=tolerance)
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
    size, method, columns
):
    point = isometry(columns, columns).float()
    drift = None
    methods = []
    step = skew(columns, size).float()
    for _ in range(60 if columns < 256 else 15):
        out = step.clone()  # the result may take the memory of the step
        taken = rotate(point, out, out=out, drift=drift)
        methods.append(taken.method)
        # The bound holds in exact arithmetic.
        assert float(isometry_error(out)) <= taken.drift + 1e-6
        point = out
        drift = taken.drift
    assert methods[0] == "corrected"
    assert methods.count("corrected") < methods.count(method)
    runs = "".join(" " if m == "corrected" else "q" for m in methods).split()
    assert max(map(len, runs)) <= 17


def test_rotate_heals_a_point_that_drifted():
    point = isometry(12, 12)
    for drift, limit in ((1e-6, 1e-5), (1e-3, 1e-5), (0.2, 1e-5), (3.0, 1e-5)):
        out = torch.empty_like(point)
        rotate(point + drift * torch.randn_like(point), skew(12, 0.05), out=out, tolerance=limit)
        assert float(isometry_error(out)) <= limit


@pytest.mark.parametrize("size", [1e-3, 0.1, 0.5, 5.0])
@pytest.mark.parametrize("gain", [1.0, 0.5])
def test_retract_is_the_polar_factor(size, gain):
    step = torch.randn(14, 6, dtype=torch.float64)
    weight = isometry(14, 6, gain) + gain * size * step / torch.linalg.matrix_norm(step, 2)
    left, _, right = torch.linalg.svd(weight, full_matrices=False)
    taken = retract_(weight, gain=gain, tolerance=1e-9)
    assert float(isometry_error(weight, gain=gain)) <= 1e-9
    assert torch.allclose(weight, gain * left @ right, atol=1e-8)
    assert (taken.method == "svd") == (size > 1.0)


def test_not_finite():
    point = isometry(4, 4)
    out = torch.zeros(4, 4, dtype=torch.float64)
    with pytest.raises(ConvergenceError, match="not finite"):
        rotate(point, torch.full((4, 4), math.nan, dtype=torch.float64), out=out)
    assert torch.equal(out, point)
    with pytest.raises(ConvergenceError, match="not finite"):
        retract_(torch.full((4, 2), math.inf))


def test_shapes():
    with pytest.raises(ShapeError, match="square"):
        skew_gradient_(torch.eye(3, 2), torch.eye(3, 2))
    with pytest.raises(ShapeError, match="rows >= columns"):
        retract_(torch.eye(2, 3))
    with pytest.raises(ShapeError):
        tangent_gradient_(torch.eye(3, 2), torch.eye(3))


TOLERANCE = 1e-3


def turn(angle):
    return torch.tensor([[0.0, -angle], [angle, 0.0]], dtype=torch.float64)


def test_batches_take_the_worst_and_report_it():
    points = torch.stack([torch.eye(2).double()] * 3)
    steps = torch.stack([turn(0.01), turn(0.1), turn(0.05)])
    out = torch.empty_like(points)
    taken = rotate(points, steps, out=out, tolerance=TOLERANCE)
    assert taken.drift == pytest.approx(0.1**4 / 4, rel=1e-9)
    for index, angle in enumerate((0.01, 0.1, 0.05)):
        assert float(out[index, 1, 0]) == pytest.approx(angle, rel=1e-9)
        assert float(out[index, 0, 0]) == pytest.approx(1 - angle**2 / 2, rel=1e-6)
    sizes = torch.tensor([1.1, 1.4, 1.2], dtype=torch.float64).sqrt()
    tall = sizes[:, None, None] * torch.eye(4, 2).double()
    assert retract_(tall).size == pytest.approx(0.4, rel=1e-9)
    torch.testing.assert_close(tall, torch.eye(4, 2).double().expand(3, 4, 2), rtol=1e-5, atol=1e-5)


def test_a_batch_with_one_step_that_is_not_finite_is_left_as_it_was():
    points = torch.stack([torch.eye(2).double()] * 2)
    out = torch.empty_like(points)
    with pytest.raises(ConvergenceError, match=r"\(2, 2, 2\)"):
        rotate(points, torch.stack([turn(0.1), turn(math.inf)]), out=out)
    assert torch.equal(out, points)
    with pytest.raises(ShapeError, match=r"\(2, 2\) and \(3, 3\)"):
        rotate(torch.eye(2), torch.eye(3), out=torch.empty(2, 2))
