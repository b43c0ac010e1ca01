"""Steps and warm-up from passes over the data."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from wellposed.training.config import RunConfig

if TYPE_CHECKING:
    from wellposed.tasks import Task


def counted_in_steps(config: RunConfig, task: Task, *, processes: int = 1) -> RunConfig:
    """Return ``config`` with the optimizer steps of its epochs, and the warm-up steps of its share.

    Status: exact. ``steps = ceil(epochs * micro-batches of a pass / (gradient_accumulation *
    processes))``.

    >>> from wellposed.tasks import build_task
    >>> from wellposed.training import TrainOptions
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
        steps = max(
            1, math.ceil(train.epochs * batches / (train.gradient_accumulation * processes))
        )
    warmup = round(train.warmup_share * steps) if train.warmup_share else train.warmup_steps
    return replace(config, train=replace(train, steps=steps, warmup_steps=warmup, warmup_share=0.0))


def with_warmup_begun(config: RunConfig, share: float, begun: RunConfig) -> RunConfig:
    """Return ``config``, counted in steps, with the warm-up that the same ``share`` gave the run
    when it was begun."""
    if round(share * begun.train.steps) != begun.train.warmup_steps:
        return config
    return replace(config, train=replace(config.train, warmup_steps=begun.train.warmup_steps))
