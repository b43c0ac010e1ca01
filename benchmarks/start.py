"""Processor time before the first step: `train` on 1,000 layers, `constrain_` on GPT-2 small."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from benchmarks.rows import Benchmark, Goal, Row, Setup, Side, row_of
from wellposed.constrain import constrain_
from wellposed.model_options import ModelOptions
from wellposed_lab.tasks.task import Task, build_task
from wellposed_lab.training.config import RunConfig, TrainOptions
from wellposed_lab.training.folder.run_folder import RunFolder
from wellposed_lab.training.loop.build import build_run_model
from wellposed_lab.training.loop.processes import StopRequest
from wellposed_lab.training.loop.run import Parts, Run
from wellposed_lab.training.loop.tracking import Progress


def begun(config: RunConfig, folder: Path, task: Task, model: nn.Module) -> Run:
    """Return a run before its first step, on one CPU and without output."""
    parts = Parts(config, task, model, Accelerator(mixed_precision="no", cpu=True))
    quiet = Progress(enabled=False, steps=config.train.steps, description="")
    return Run(
        config, RunFolder(folder), task, parts, progress=quiet, stop=StopRequest(), environment={}
    )


def before_first_step(config: RunConfig, task: Task) -> None:
    """Do everything that `train` does before its first step, except files of its folder."""
    with tempfile.TemporaryDirectory() as folder:
        model = build_run_model(config, task)
        begun(config, Path(folder), task, model)


def attach_rows(setup: Setup) -> Iterator[Row]:
    """Yield the seconds of `constrain_` on the matrices of GPT-2 small, with finding roles."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=setup.size(12, 1), n_embd=setup.size(768, 48)))
    optimizer = torch.optim.SGD(model.parameters())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    attention = ("query", "key", "value", "output")
    for to, roles in (("orthogonal", attention), ("spectral", "layers")):

        def attach(to: str = to, roles: str | tuple[str, ...] = roles) -> None:
            constrain_(model, optimizer, where=roles, to=to).remove()

        side = Side(attach, prepare=lambda: model.load_state_dict(state))
        times = setup.interleave({"attach": side}, 3)
        yield row_of(f"seconds of constrain_ on GPT-2 small, {to}", times["attach"])


def rows(setup: Setup) -> Iterator[Row]:
    yield from attach_rows(setup)
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


ATTACHING = (
    "Eleven products a matrix, five of them in float64, or one eigendecomposition take 3.3 to 3.7 s"
    " of two threads, and finding the roles 0.7 s."
)
BENCHMARK = Benchmark(
    "seconds of train before its first step, for 1,000 layers", "<= 10 s", 2, rows,
    goals=(
        Goal("seconds of train*", "<= 10"),
        Goal("seconds of constrain_*", "<= 3", ATTACHING),
    ),
)  # fmt: skip
