"""Turns of the plane: what `rotate` reports of its error, where every row norm is a number."""

from __future__ import annotations

import math

import pytest
import torch

from wellposed.errors import ConvergenceError, ShapeError
from wellposed.linalg import isometry_error, retract_, rotate, skew_gradient_, tangent_gradient_

TOLERANCE = 1e-3
SHARE = 0.9 * TOLERANCE


def turn(angle: float) -> torch.Tensor:
    return torch.tensor([[0.0, -angle], [angle, 0.0]], dtype=torch.float64)


@pytest.mark.parametrize("gain", [1.0, 0.5])
@pytest.mark.parametrize("is_skew", [True, False])
@pytest.mark.parametrize("angle", [0.01, 0.1, 0.18, 0.25, 0.5, 0.6])
@pytest.mark.parametrize("defect", [0.0, 1e-5, 2e-4])
def test_the_error_that_is_left_of_a_turn(
    angle: float, defect: float, gain: float, is_skew: bool
) -> None:
    """Rows of A, A^2/2 and A^3/8 are t, t^2/2 and t^3/8; W^T W = (1 + defect) I has rows of the
    defect."""
    point = gain * math.sqrt(1 + defect) * torch.eye(2, dtype=torch.float64)
    out = torch.empty_like(point)
    taken = rotate(
        point, gain * turn(angle), out=out, gain=gain, tolerance=TOLERANCE, step_is_skew=is_skew
    )
    assert float(isometry_error(out, gain=gain)) <= TOLERANCE
    is_cubic = angle**4 / 4 > 0.4 * SHARE
    own = angle**6 / 64 if is_cubic else angle**4 / 4
    reach = angle + angle**2 / 2 + (angle**3 / 8 if is_cubic else 0.0)
    spectral = math.sqrt(2) * defect
    left = (
        own
        + reach * defect * (1 + spectral)
        + reach**2 * spectral
        + defect**2 * (0.75 + 0.25 * spectral)
    )
    if own <= SHARE and left <= SHARE:
        assert taken.method == "corrected"
        assert taken.drift == pytest.approx(left, rel=1e-6, abs=1e-14)
        assert math.isnan(taken.size)
    else:
        assert taken.method == "newton_schulz"
        # sqrt(n) times the largest row of A^2, or of A^3, bounds that power of |A|_2.
        assert taken.size == pytest.approx(
            min(angle * 2**0.25, angle * 2 ** (1 / 6) if is_cubic else 9.0), rel=1e-6
        )


def test_errors_of_steps_that_are_not_measured_add_up_until_they_are() -> None:
    """Each adds its own defect and a twentieth of the tolerance; above nine tenths of it the error
    is measured."""
    own = 0.1**4 / 4
    for drift in (0.0, 0.3 * TOLERANCE, SHARE - 0.05 * TOLERANCE - own):
        out = torch.empty(2, 2, dtype=torch.float64)
        taken = rotate(
            torch.eye(2).double(),
            turn(0.1),
            out=out,
            tolerance=TOLERANCE,
            drift=drift * (1 - 1e-12),
        )
        assert taken.method == "quadratic"
        assert taken.drift == pytest.approx(drift + own + 0.05 * TOLERANCE, rel=1e-9)
    taken = rotate(
        torch.eye(2).double(),
        turn(0.1),
        out=out,
        tolerance=TOLERANCE,
        drift=SHARE - 0.04 * TOLERANCE - own,
    )
    assert taken.method == "corrected"
    assert taken.drift == pytest.approx(own, rel=1e-9)


@pytest.mark.parametrize(
    ("angle", "method"), [(0.9, "newton_schulz"), (1.2, "exponential"), (3.0, "exponential")]
)
def test_turns_of_about_a_radian_and_more(angle: float, method: str) -> None:
    point = torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64)
    out = torch.empty_like(point)
    taken = rotate(point, turn(angle), out=out, tolerance=1e-9, step_is_skew=True)
    assert taken.method == method
    assert angle * (1 - 1e-9) <= taken.size <= angle * 2**0.25 * (1 + 1e-9)
    start = math.atan2(0.8, 0.6)
    assert math.cos(start + angle) == pytest.approx(
        float(out[0, 0]), abs=1e-8 if method == "exponential" else 0.05
    )
    assert float(isometry_error(out)) <= 1e-9
    assert taken.drift <= 1e-9


@pytest.mark.parametrize("gain", [1.0, 2.0])
@pytest.mark.parametrize(
    ("error", "method"), [(1e-3, "series"), (0.3, "newton_schulz"), (0.9, "newton_schulz")]
)
def test_the_size_of_a_tall_step_is_that_of_its_error(
    error: float, method: str, gain: float
) -> None:
    """W = g sqrt(1 + e) Q: W^T W / g^2 - I = e I, whose size is found exactly."""
    columns = torch.linalg.qr(torch.randn(5, 2, dtype=torch.float64))[0]
    weight = gain * math.sqrt(1 + error) * columns
    taken = retract_(weight, gain=gain, tolerance=1e-9)
    assert taken.method == method
    assert taken.size == pytest.approx(error, rel=1e-9)
    torch.testing.assert_close(weight, gain * columns, rtol=1e-9, atol=1e-9)
    assert math.isnan(taken.drift)
    far = gain * math.sqrt(1.96) * columns
    assert retract_(far, gain=gain).method == "svd"
    torch.testing.assert_close(far, gain * columns, rtol=1e-9, atol=1e-9)


def test_the_series_is_taken_alone_only_where_its_fourth_power_is_small() -> None:
    """It leaves 35/64 e^4, held to half of the tolerance."""
    columns = torch.linalg.qr(torch.randn(5, 2, dtype=torch.float64))[0]
    for error, tolerance, method in ((0.05, 8e-6, "series"), (0.05, 6e-6, "newton_schulz")):
        weight = math.sqrt(1 + error) * columns
        assert retract_(weight, tolerance=tolerance).method == method
    weight = math.sqrt(1.05) * columns
    retract_(weight, tolerance=1.0)
    assert float(isometry_error(weight)) == pytest.approx(35 / 64 * 0.05**4, rel=0.1)


def test_batches_take_the_worst_and_report_it() -> None:
    points = torch.stack([torch.eye(2).double()] * 3)
    steps = torch.stack([turn(0.01), turn(0.1), turn(0.05)])
    out = torch.empty_like(points)
    taken = rotate(points, steps, out=out, tolerance=TOLERANCE, step_is_skew=True)
    assert taken.drift == pytest.approx(0.1**4 / 4, rel=1e-9)
    for place, angle in enumerate((0.01, 0.1, 0.05)):
        assert float(out[place, 1, 0]) == pytest.approx(angle, rel=1e-9)
        assert float(out[place, 0, 0]) == pytest.approx(1 - angle**2 / 2, rel=1e-6)
    tall = torch.stack(
        [math.sqrt(1 + error) * torch.eye(4, 2).double() for error in (0.1, 0.4, 0.2)]
    )
    assert retract_(tall).size == pytest.approx(0.4, rel=1e-9)
    torch.testing.assert_close(tall, torch.eye(4, 2).double().expand(3, 4, 2), rtol=1e-5, atol=1e-5)
    gradients = torch.randn(3, 2, 2, dtype=torch.float64)
    expected = torch.stack([(gradient - gradient.T) / 2 for gradient in gradients])
    torch.testing.assert_close(skew_gradient_(points, gradients.clone()), expected)
    ambient = torch.randn(3, 4, 2, dtype=torch.float64)
    frames = torch.eye(4, 2).double().expand(3, 4, 2).contiguous()
    found = tangent_gradient_(frames, ambient.clone())
    top = ambient[:, :2]
    torch.testing.assert_close(found[:, :2], (top - top.mT) / 2)
    torch.testing.assert_close(found[:, 2:], ambient[:, 2:])


def test_a_batch_with_one_step_that_is_not_finite_is_left_as_it_was() -> None:
    points = torch.stack([torch.eye(2).double()] * 2)
    out = torch.empty_like(points)
    with pytest.raises(ConvergenceError, match=r"\(2, 2, 2\)"):
        rotate(points, torch.stack([turn(0.1), turn(math.inf)]), out=out)
    assert torch.equal(out, points)
    with pytest.raises(ShapeError, match=r"\(2, 2\) and \(3, 3\)"):
        rotate(torch.eye(2), torch.eye(3), out=torch.empty(2, 2))
