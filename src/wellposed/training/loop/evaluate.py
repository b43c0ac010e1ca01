"""Loss and metrics of a split, as totals over all of its batches and processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import nn

from wellposed.training.config import TrainOptions
from wellposed.training.loop.batches import Batch, forward, to_device
from wellposed.training.loop.loading import collated
from wellposed.training.loop.step import autocast, scaled, sum_over_processes

if TYPE_CHECKING:
    from wellposed.tasks import Task
    from wellposed.tasks.data.splits import Split


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one split (``loss`` among them), how many examples they are over, and a batch with
    a bad loss.

    ``notes`` are entries of ``result.json`` about how the metrics came about.
    """

    metrics: dict[str, float]
    examples: int
    bad_batch: Batch | None = None
    notes: dict[str, Any] = field(default_factory=dict)


def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    task: Task,
    split: Split,
    options: TrainOptions,
    *,
    max_batches: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Return the metrics of ``model`` on ``split``, or None when ``stop()`` became true on the way.

    Status: exact. Sums and counts are added up in float64 over batches and processes, so the result
    does not depend on the batch size. Every process runs the model as often; what is run beyond the
    split is not counted. Dropout is off; no random number is drawn; the mode of the model is put
    back.

    Cost: one forward pass over the split, or over its first ``max_batches`` batches.
    """
    order = task.batches(split, options.batch_size, seed=0, epoch=0)
    order = order[:max_batches] if max_batches is not None else order
    totals: dict[str, tuple[float, float]] = {}
    bad_batch: Batch | None = None
    was_training = model.training
    model.eval()
    try:
        share = _share_of_process(order, accelerator.process_index, accelerator.num_processes)
        batches = collated(
            task, split, [members for members, _ in share], workers=options.num_workers
        )
        for batch, (_, counts) in zip(batches, share, strict=True):
            if stop():
                return None
            batch = to_device(batch, accelerator.device)
            sums = _batch_sums(accelerator, model, task, batch, options)
            if not counts:
                sums = dict.fromkeys(sums, (0.0, 0.0))
            if bad_batch is None and not math.isfinite(sums["loss"][0]):
                bad_batch = batch
            totals = {
                name: (
                    totals.get(name, (0.0, 0.0))[0] + sums[name][0],
                    totals.get(name, (0.0, 0.0))[1] + sums[name][1],
                )
                for name in sums
            }
    finally:
        model.train(was_training)
    totals = _over_processes(accelerator, totals)
    loss_sum, count = totals.pop("loss", (0.0, 0.0))
    metrics = {"loss": loss_sum / max(1.0, count), **(task.summarize(totals) if totals else {})}
    return Evaluation(metrics, sum(map(len, order)), bad_batch)


def _share_of_process(
    order: list[list[int]], rank: int, world: int
) -> list[tuple[list[int], bool]]:
    """Return as many batches to every process, as their calls wait for each other; the last may not
    count for some."""
    firsts = range(0, len(order), world)
    return [
        (order[first + rank], True) if first + rank < len(order) else (order[first], False)
        for first in firsts
    ]


@torch.no_grad()
def _batch_sums(
    accelerator: Accelerator, model: nn.Module, task: Task, batch: Batch, options: TrainOptions
) -> dict[str, tuple[float, float]]:
    with autocast(accelerator.device, options):
        logits = scaled(forward(model, batch), options)
        loss_sum, count = task.loss_sum(logits, batch)
    return {**task.metric_sums(logits, batch), "loss": (float(loss_sum), float(count))}


def _over_processes(
    accelerator: Accelerator, totals: dict[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    if accelerator.num_processes == 1:
        return totals
    names = sorted(totals)
    mine = torch.tensor([totals[name] for name in names], dtype=torch.float64)
    pairs = sum_over_processes(accelerator, mine).tolist()
    return {name: (pair[0], pair[1]) for name, pair in zip(names, pairs, strict=True)}
