"""Metrics of a split, scores of generated texts, and the layer where numbers stop being finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch

from wellposed.errors import DataError
from wellposed.nn import frozen
from wellposed_lab.training.folder.state import Evaluation
from wellposed_lab.training.loop import batches
from wellposed_lab.training.loop import step as steps
from wellposed_lab.training.loop.batches import Batch
from wellposed_lab.training.loop.divergence import Blame, Divergence, first_nonfinite_module
from wellposed_lab.training.loop.machine import sum_over_processes
from wellposed_lab.training.loop.processes import Cancelled
from wellposed_lab.training.loop.run import Run

GENERATE_BATCH = 64


def evaluate(run: Run, split: Literal["valid", "test"]) -> Evaluation:
    """Return the metrics of the current weights on ``split``, or its configured first batches.

    Status: exact. Sums are added in float64 over batches and processes, for any batch size. Every
    process runs the model equally often; extra batches are not counted. Dropout is off, and a model
    that draws in evaluation draws by the run's seed, apart from training. The mode is restored.

    Raises:
        Cancelled: the run was asked to stop.
        DataError: the split is empty.
        Divergence: the loss is not finite.
    """
    prepared = run.parts.prepared
    accelerator = run.parts.accelerator
    dataset = run.task.dataset(split)
    order = run.task.batches(split, run.options.batch_size, seed=0, epoch=0)
    order = order[: run.options.eval_batches if split == "valid" else run.test_batches]
    if not order:
        problem = f"{run.task.name}: the {split} split is empty"
        raise DataError(f"{problem}; a run needs it to choose and report weights")

    totals: dict[str, tuple[float, float]] = {}
    bad: list[Batch] = []
    rank = accelerator.process_index
    world = accelerator.num_processes
    # Equally many batches in every process, as their calls wait for each other.
    mine = [order[min(first + rank, len(order) - 1)] for first in range(0, len(order), world)]
    was_training = prepared.training
    prepared.eval()

    try:
        with frozen(run.parts.model):  # contractive layers bound their weights once
            for number, members in enumerate(mine):
                if run.stop_requested():
                    raise Cancelled
                batch = run.task.collate([dataset[member] for member in members])
                batch = batches.to_device(batch, accelerator.device)
                with own_draws(run.options.seed + number):
                    sums = _batch_sums(run, batch)
                if number * world + rank >= len(order):
                    sums = dict.fromkeys(sums, (0.0, 0.0))
                if not bad and not math.isfinite(sums["loss"][0]):
                    bad = [batch]
                for name, (value, count) in sums.items():
                    before = totals.get(name, (0.0, 0.0))
                    totals[name] = before[0] + value, before[1] + count
    finally:
        prepared.train(was_training)

    if world > 1:
        names = sorted(totals)
        values = torch.tensor([totals[name] for name in names], dtype=torch.float64)
        pairs = sum_over_processes(accelerator, values).tolist()
        totals = {name: (pair[0], pair[1]) for name, pair in zip(names, pairs, strict=True)}

    loss_sum, count = totals.pop("loss")
    loss = loss_sum / max(1.0, count)
    if not math.isfinite(loss):
        step = max(1, run.state.step)
        blame = layer_at_fault(run, bad, training=False)
        what = f"loss on {split} is {loss}"
        raise Divergence(step=step, learning_rate=run.rate(step), what=what, blame=blame)
    metrics = run.task.summarize(totals) if totals else {}

    return Evaluation({"loss": loss, **metrics}, sum(map(len, order)))


@contextmanager
def own_draws(seed: int) -> Iterator[None]:
    """Seed torch's generator of the CPU, and restore it: what is drawn inside moves no later draw."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@torch.no_grad()
def _batch_sums(run: Run, batch: Batch) -> dict[str, tuple[float, float]]:
    with steps.autocast(run.parts.accelerator.device, run.options):
        logits = steps.scaled(batches.forward(run.parts.prepared, batch), run.options)
        loss_sum, count = run.task.loss_sum(logits, batch)
    sums = run.task.metric_sums(logits, batch)
    return {**sums, "loss": (float(loss_sum), float(count))}


def score_texts(run: Run, split: Literal["valid", "test"]) -> dict[str, float]:
    """Return the scores of texts that the final weights generate for ``split``, if any."""
    if run.task.report_headline is not None:
        run.progress.say(f"generating the texts of {split}")
        if run.stop_requested():
            raise Cancelled

    def notify(done: int, count: int) -> None:
        del done, count
        if run.stop.requested and run.parts.accelerator.num_processes == 1:
            raise Cancelled

    size = min(GENERATE_BATCH, run.options.batch_size)
    with own_draws(run.options.seed), frozen(run.parts.model):
        scores = run.task.generate_metrics(run.parts.model, split, batch_size=size, notify=notify)
    return {name: float(value) for name, value in scores.items()}


def layer_at_fault(run: Run, again: Iterable[Batch], *, training: bool) -> Blame | None:
    """Run batches again in all processes and name the module where numbers stop being finite."""
    model = run.parts.model.train(training)
    due = run.penalties_of_step()
    # A certificate refuses a model with hooks.
    of_weights = torch.zeros(()) if due.of_weights is None else due.of_weights().detach()

    def losses(batch: Batch) -> Mapping[str, Any]:
        batch = batches.to_device(batch, run.parts.accelerator.device)
        loss, _, auxiliary = steps.training_loss(
            model, model, run.task, batch, run.options, progress=run.progress_of_step()
        )
        extra = of_weights if due.of_batch is None else due.of_batch() + of_weights
        terms = {"(the loss)": loss, "(the auxiliary loss)": auxiliary, "(the penalty)": extra}
        return {name: value for name, value in terms.items() if value is not None}

    faults = (first_nonfinite_module(model, partial(losses, batch)) for batch in again)
    blame = next(filter(None, faults), None)
    model.train()
    return blame
