"""Processor time of `train` before its first step, for 1,000 layers: the model, its roles, what is
watched and held, and the measurement of every weight."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from accelerate import Accelerator

from benchmarks.rows import Benchmark, Goal, Row, Setup, row_of
from wellposed.tasks import Task, build_task
from wellposed.training import ModelOptions, RunConfig, TrainOptions
from wellposed.training.loop.build import build_run_model
from wellposed.training.loop.run import Run
from wellposed.training.loop.tracking import Progress


def before_first_step(config: RunConfig, task: Task) -> None:
    """Do what `train` does up to there, its folder's files aside."""
    with tempfile.TemporaryDirectory() as folder:
        model = build_run_model(config, task)
        run = Run(config, Path(folder), task, model, Accelerator(mixed_precision="no", cpu=True))
        run.progress = Progress(enabled=False, steps=1, description="")
        run.begin(None)


def rows(setup: Setup) -> Iterator[Row]:
    """One for each variant."""
    layers = setup.size(1000, 2)
    for variant in ("pre_ln", "t_fixup"):
        config = RunConfig(
            "char_lm",
            {"limit_chars": 200_000, "seq_len": 64},
            variant=variant,
            model=ModelOptions(hidden_size=32, num_hidden_layers=layers, num_attention_heads=2),
            train=TrainOptions(batch_size=8),
        )
        task = build_task(config.task, config.task_options)
        times = setup.interleave({"start": lambda c=config, t=task: before_first_step(c, t)}, 3)
        name = f"seconds of train before its first step, {layers} layers of width 32, {variant}"
        yield row_of(name, times["start"])


BENCHMARK = Benchmark(
    "seconds of train before its first step, for 1,000 layers", "<= 10 s", 2, rows,
    goals=(Goal("seconds of train*", "<= 10"),),
)  # fmt: skip
