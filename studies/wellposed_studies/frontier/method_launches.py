"""Launches and memory of a step of a method beyond one of AdamW, for `frontier/methods`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wellposed.plan import Meter
from wellposed_studies.frontier.method_data import Data, Training
from wellposed_studies.frontier.method_runs import start
from wellposed_studies.frontier.training_methods import BASELINES

STEPS_BEFORE = 4
"""Steps before the counted one: later ones keep copies that the first make."""


@dataclass(frozen=True)
class StepCost:
    """Counts of one step of training, or their difference from those of AdamW."""

    launches: int
    """Operations on tensors, views left out; one over a list of tensors counts once."""
    peak_bytes: int
    """Most memory at once in tensors that the step makes, activations and gradients included."""
    kept_bytes: int
    """Memory in tensors that the first steps leave behind, gradients and step counters left out."""


class _Launches(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = (torch.ops.aten.detach.default, torch.ops.aten._unsafe_view.default)
        self.count += not (func.is_view or func in views)
        return func(*args, **(kwargs or {}))


def cost_over_plain(training: Training, data: Data, plain: StepCost) -> StepCost:
    """Return the cost of a step of the method beyond ``plain``, that of AdamW on the same kind of model.

    Status: counted on a CPU, along the path of a GPU: optimizers step lists of tensors, and constraints
    step stacks of matrices. torch's Muon steps one matrix after the other. An operation on a list
    counts once; a GPU may split it. Spectral sets leave out matrices that are surely inside, so their
    count depends on the step.
    """
    full = step_cost(training, data)
    return StepCost(
        launches=full.launches - plain.launches,
        peak_bytes=full.peak_bytes - plain.peak_bytes,
        kept_bytes=full.kept_bytes - plain.kept_bytes,
    )


def plain_cost(training: Training, data: Data) -> StepCost:
    """Return the cost of a step of AdamW on the model of a training."""
    return step_cost(replace(training, method=BASELINES[0]), data)


def step_cost(training: Training, data: Data) -> StepCost:
    """Return the counts of a step after the first `STEPS_BEFORE`."""
    started = start(training, data)
    optimizer = started.attached.optimizer
    for group in optimizer.param_groups:
        if "foreach" in group:
            group["foreach"] = True
    if hasattr(started.attached.handle, "batched"):
        started.attached.handle.batched = True

    steps = STEPS_BEFORE + 2
    longer = replace(training, steps=max(training.steps, steps))
    read = list(itertools.islice(data.batches(longer), steps))
    with Meter() as meter:
        for number in range(STEPS_BEFORE):
            started.step(number, read[number])
        optimizer.zero_grad()
        kept_bytes = meter.bytes
    with _Launches() as launches:
        started.step(STEPS_BEFORE, read[-2])
    optimizer.zero_grad()
    with Meter() as within:
        started.step(STEPS_BEFORE + 1, read[-1])
    return StepCost(launches.count, within.peak_bytes, kept_bytes)
