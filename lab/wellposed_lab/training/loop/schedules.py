"""Learning-rate schedules, and the number of steps in the epochs of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from wellposed.registry import Registry
from wellposed_lab.tasks.task import Task
from wellposed_lab.training.config import DECAYS_TO_ZERO, RunConfig, TrainOptions

ScheduleFunction = Callable[[int, TrainOptions, int], float]
SCHEDULES: Registry[ScheduleFunction] = Registry("schedule")


def learning_rate(step: int, options: TrainOptions, hidden_size: int) -> float:
    """Return the learning rate of step t = ``step`` (the first is 1) by ``options.schedule``.

    Status: exact. Names, for n = t - 1 steps done, w = ``warmup_steps``, S = ``steps``:

    - ``constant``: lr min(1, t / w)
    - ``inverse_sqrt``: lr sqrt(D / (D + n)) with D = ``decay_steps``
    - ``inverse_sqrt_warmup``: lr min(t / w, sqrt(w / t))
    - ``kim2021``: gamma / sqrt(hidden_size) min(t^-1/2, t w^-3/2) (Kim et al. 2021, after Vaswani
      et al. 2017), with the width of the model
    - ``linear``: lr t / w while t <= w, then lr (S - n) / (S - w)
    - ``cosine``: lr t / w while t <= w, then lr (1 + cos(pi (n - w) / (S - w))) / 2

    With the last two, the last step still moves. An unknown schedule is a `ConfigError` (nearest
    three named).

    >>> learning_rate(1, TrainOptions(schedule="inverse_sqrt", learning_rate=0.5, decay_steps=4000), 128)
    0.5
    """
    return SCHEDULES.get(options.schedule)(step, options, hidden_size)


@SCHEDULES.register("constant")
def constant(step: int, options: TrainOptions, _: int) -> float:
    """Return lr, after linear warm-up if there is one."""
    return options.learning_rate * min(1.0, step / max(1, options.warmup_steps))


@SCHEDULES.register("inverse_sqrt")
def inverse_sqrt(step: int, options: TrainOptions, _: int) -> float:
    return options.learning_rate * math.sqrt(options.decay_steps / (options.decay_steps + step - 1))


@SCHEDULES.register("inverse_sqrt_warmup")
def inverse_sqrt_warmup(step: int, options: TrainOptions, _: int) -> float:
    warm = options.warmup_steps
    return options.learning_rate * min(step / warm, math.sqrt(warm / step))


@SCHEDULES.register("kim2021")
def kim2021(step: int, options: TrainOptions, hidden_size: int) -> float:
    factor = min(step**-0.5, step * options.warmup_steps**-1.5)
    return options.gamma / math.sqrt(hidden_size) * factor


@SCHEDULES.register("cosine")
def cosine(step: int, options: TrainOptions, _: int) -> float:
    """Return lr (1 + cos(pi x)) / 2, where x is the fraction of steps done after warm-up."""
    if step <= options.warmup_steps:
        return constant(step, options, 0)
    share = (step - 1 - options.warmup_steps) / (options.steps - options.warmup_steps)
    return options.learning_rate * 0.5 * (1.0 + math.cos(math.pi * share))


@SCHEDULES.register("linear")
def linear(step: int, options: TrainOptions, _: int) -> float:
    """Return lr times the fraction of steps left after warm-up."""
    if step <= options.warmup_steps:
        return constant(step, options, 0)
    left = options.steps - step + 1
    return options.learning_rate * left / (options.steps - options.warmup_steps)


def counted_in_steps(config: RunConfig, task: Task, *, processes: int = 1) -> RunConfig:
    """Return ``config`` with the optimizer steps of its epochs, and the warm-up steps of its share.

    Status: exact: ``steps = ceil(epochs * micro-batches / (gradient_accumulation * processes))``.

    >>> from wellposed_lab.tasks.task import build_task
    >>> from wellposed_lab.training.config import TrainOptions
    >>> task = build_task("char_lm", {"limit_chars": 20000, "seq_len": 64})
    >>> config = RunConfig("char_lm", train=TrainOptions(epochs=2, batch_size=100, warmup_share=0.1))
    >>> counted = counted_in_steps(config, task).train
    >>> len(task.dataset("train")), counted.steps, counted.warmup_steps
    (318, 8, 1)
    """
    train = config.train
    steps = train.steps
    if train.epochs is not None:
        batches = len(task.batches("train", train.batch_size, seed=train.seed, epoch=0))
        of_a_step = train.gradient_accumulation * processes
        steps = max(1, math.ceil(train.epochs * batches / of_a_step))
    warmup = round(train.warmup_share * steps) if train.warmup_share else train.warmup_steps
    return replace(config, train=replace(train, steps=steps, warmup_steps=warmup, warmup_share=0.0))


def longer_note(begun: RunConfig, config: RunConfig) -> str:
    """Return one line about a run that is trained longer: whether its rates change."""
    name = config.train.schedule
    note = f"trained longer: {begun.train.steps} -> {config.train.steps} steps; the schedule {name}"
    if name not in DECAYS_TO_ZERO:
        return f"{note} does not depend on them, so this is the run of {config.train.steps} steps"
    return f"{note} follows them, so this is not the run of {config.train.steps} steps"
