"""Learning rates against closed forms written down a second time, and the edges between their
pieces."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from wellposed.errors import ConfigError
from wellposed.training import SCHEDULES, TrainOptions, learning_rate
from wellposed.training.config import Schedule

BASE = TrainOptions(steps=50, learning_rate=0.3, warmup_steps=7, decay_steps=20, gamma=0.8)


def rates(schedule: Schedule, **changes: object) -> list[float]:
    options = dataclasses.replace(BASE, schedule=schedule, **changes)
    return [learning_rate(step, options, hidden_size=64) for step in range(1, options.steps + 1)]


def test_every_schedule_of_the_configuration_is_registered() -> None:
    assert set(SCHEDULES.names()) == set(Schedule.__args__)


def test_constant_warms_up_linearly_then_stays() -> None:
    assert rates("constant") == pytest.approx(
        [0.3 * t / 7 for t in range(1, 7)] + [0.3] * 44, rel=1e-15
    )
    assert rates("constant", warmup_steps=0) == [0.3] * 50


def test_inverse_sqrt() -> None:
    assert rates("inverse_sqrt") == pytest.approx(
        [0.3 * (20 / (20 + n)) ** 0.5 for n in range(50)], rel=1e-15
    )


def test_inverse_sqrt_warmup_peaks_at_the_end_of_warmup() -> None:
    values = rates("inverse_sqrt_warmup")
    assert values == pytest.approx(
        [0.3 * t / 7 for t in range(1, 8)] + [0.3 * (7 / t) ** 0.5 for t in range(8, 51)], rel=1e-14
    )
    assert values.index(max(values)) == 6


def test_kim2021_meets_at_the_warmup_step() -> None:
    expected = [0.8 / 8 * (t * 7**-1.5 if t < 7 else t**-0.5) for t in range(1, 51)]
    assert rates("kim2021") == pytest.approx(expected, rel=1e-14)


def test_cosine_falls_from_the_peak_and_still_moves_at_the_last_step() -> None:
    values = rates("cosine")
    assert values[:7] == pytest.approx([0.3 * t / 7 for t in range(1, 8)], rel=1e-15)
    assert values[7] == 0.3  # the first step after warm-up is at the peak
    assert values[-1] == pytest.approx(0.15 * (1 + math.cos(math.pi * 42 / 43)), rel=1e-12)
    assert 0 < values[-1] < 1e-3
    assert all(later < earlier for earlier, later in itertools.pairwise(values[7:]))


def test_a_schedule_that_needs_warmup_says_so() -> None:
    for schedule in ("kim2021", "inverse_sqrt_warmup"):
        with pytest.raises(
            ConfigError, match=f"warmup_steps = 0, expected at least 1 for the schedule {schedule}"
        ):
            TrainOptions(schedule=schedule)
