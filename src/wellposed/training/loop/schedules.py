"""Learning rates as closed functions of the step, so that resuming needs no scheduler state.

A schedule is a function of ``(t, options, hidden_size)`` where t = 1, 2, ... numbers the optimizer
steps. A new one is one function here and its name in `wellposed.training.config.Schedule`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from wellposed.registry import Registry
from wellposed.training.config import TrainOptions

ScheduleFunction = Callable[[int, TrainOptions, int], float]
SCHEDULES: Registry[ScheduleFunction] = Registry("schedule")


def learning_rate(step: int, options: TrainOptions, hidden_size: int) -> float:
    """Return the learning rate of optimizer step ``step`` (the first is 1) under
    ``options.schedule``.

    Status: exact. Schedules, with n = t - 1 steps done, w = ``warmup_steps``, S = ``steps``:

    - ``constant``: lr min(1, t / w)
    - ``inverse_sqrt``: lr sqrt(D / (D + n)) with D = ``decay_steps``
    - ``inverse_sqrt_warmup``: lr min(t / w, sqrt(w / t))
    - ``kim2021``: gamma / sqrt(hidden_size) min(t^-1/2, t w^-3/2) (Kim et al. 2021, after Vaswani
      et al. 2017)
    - ``linear``: lr t / w while t <= w, then lr (S - n) / (S - w), so the last step still moves
    - ``cosine``: lr t / w while t <= w, then lr (1 + cos(pi (n - w) / (S - w))) / 2, so the last
      step still moves

    Args:
        step: t, from 1.
        options: the training options.
        hidden_size: width of the model; used by kim2021 alone.

    Returns:
        The learning rate, a positive float.

    Raises:
        ConfigError: the schedule is not registered (nearest three named).

    Cost: a few float operations. Not for step 0: no update has that number.

    >>> learning_rate(1, TrainOptions(schedule="inverse_sqrt", learning_rate=0.5, decay_steps=4000), 128)
    0.5
    """
    return SCHEDULES.get(options.schedule)(step, options, hidden_size)


def _warmup(step: int, options: TrainOptions) -> float:
    return min(1.0, step / options.warmup_steps) if options.warmup_steps else 1.0


@SCHEDULES.register("constant")
def constant(step: int, options: TrainOptions, hidden_size: int) -> float:
    """Return lr, after linear warm-up where asked."""
    del hidden_size
    return options.learning_rate * _warmup(step, options)


@SCHEDULES.register("inverse_sqrt")
def inverse_sqrt(step: int, options: TrainOptions, hidden_size: int) -> float:
    """Return lr sqrt(D / (D + n))."""
    del hidden_size
    return options.learning_rate * math.sqrt(options.decay_steps / (options.decay_steps + step - 1))


@SCHEDULES.register("inverse_sqrt_warmup")
def inverse_sqrt_warmup(step: int, options: TrainOptions, hidden_size: int) -> float:
    """Return lr min(t / w, sqrt(w / t))."""
    del hidden_size
    return options.learning_rate * min(
        step / options.warmup_steps, math.sqrt(options.warmup_steps / step)
    )


@SCHEDULES.register("kim2021")
def kim2021(step: int, options: TrainOptions, hidden_size: int) -> float:
    """Return gamma / sqrt(hidden_size) min(t^-1/2, t w^-3/2)."""
    return (
        options.gamma / math.sqrt(hidden_size) * min(step**-0.5, step * options.warmup_steps**-1.5)
    )


@SCHEDULES.register("cosine")
def cosine(step: int, options: TrainOptions, hidden_size: int) -> float:
    """Return lr (1 + cos(pi x)) / 2 with x the share of the steps after warm-up that is done."""
    del hidden_size
    if step <= options.warmup_steps:
        return options.learning_rate * _warmup(step, options)
    share = (step - 1 - options.warmup_steps) / (options.steps - options.warmup_steps)
    return options.learning_rate * 0.5 * (1.0 + math.cos(math.pi * share))


@SCHEDULES.register("linear")
def linear(step: int, options: TrainOptions, hidden_size: int) -> float:
    """Return lr times the share of the steps after warm-up that is left."""
    del hidden_size
    if step <= options.warmup_steps:
        return options.learning_rate * _warmup(step, options)
    return (
        options.learning_rate * (options.steps - step + 1) / (options.steps - options.warmup_steps)
    )
