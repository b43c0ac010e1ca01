"""The training loop: steps, evaluations, checkpoints, and where numbers stop being finite."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any, Literal

import torch

from wellposed.errors import DataError
from wellposed.training.folder.tensors import restore_torch_states, torch_states
from wellposed.training.loop.batches import (
    Batch,
    collated,
    forward,
    forward_with_auxiliary,
    to_device,
)
from wellposed.training.loop.build import set_learning_rate
from wellposed.training.loop.divergence import Divergence, first_nonfinite_module
from wellposed.training.loop.processes import Cancelled
from wellposed.training.loop.run import Run, UnshardedModel
from wellposed.training.loop.schedules import learning_rate
from wellposed.training.loop.state import Evaluation, Window
from wellposed.training.loop.step import (
    Penalty,
    StepNumbers,
    autocast,
    compute_gradients,
    scaled,
    sum_over_processes,
)

RULING_PENALTY = 10.0
"""Times the loss of the task at which the first penalty is spoken of."""


def fit(run: Run) -> None:
    """Alternate steps with evaluations and checkpoints; a run can resume from any state at the top
    of the loop.

    Raises:
        Cancelled: the run was asked to stop.
        Divergence: a loss or gradient is not finite.
    """
    state, options, check_targets = run.state, run.options, True
    while True:
        last = state.step >= options.steps
        if state.evaluated_step < state.step and (last or state.step % options.eval_every == 0):
            validate(run)
        patience = options.patience
        last = last or (patience is not None and state.evaluations_without_gain >= patience)
        due = state.step and state.step % options.checkpoint_every == 0
        if last or due or state.step == state.best_step:
            run.save()
        if last:
            return
        if run.stop_requested():
            raise Cancelled
        take_step(run, check_targets=check_targets)
        check_targets = False


def take_step(run: Run, *, check_targets: bool = False) -> None:
    """Take one optimizer step, if its numbers are finite."""
    began = time.perf_counter()
    state, options = run.state, run.options
    rate = _rate(run, state.step + 1)
    set_learning_rate(run.optimizer, rate)
    micro_batches = run.batches.take(run.micro_batches)
    scaled_loss, random_states = options.precision == "fp16", torch_states()
    where = (run.accelerator, run.prepared, run.task)
    asked = {"penalty": _penalty_of_step(run, run.penalty), "check_targets": check_targets}
    while True:
        scale = state.loss_scale if scaled_loss else 1.0
        numbers = compute_gradients(*where, micro_batches, options, loss_scale=scale, **asked)
        if numbers.finite:
            break
        restore_torch_states(random_states)
        if scaled_loss and numbers.finite_losses and state.loss_scale > 1:
            state.lower_scale()  # and the same micro-batches again: no step is left out
            run.optimizer.zero_grad(set_to_none=True)
            continue
        raise _divergence(run, numbers, micro_batches, rate)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    if scaled_loss:
        state.count_scaled_step()
    state.epoch, state.batch_index = run.batches.epoch, run.batches.index
    state.count(numbers, time.perf_counter() - began)
    if state.step == 1:
        _warn_of_strength(run, numbers)
    if state.step % options.log_every == 0 or state.step == options.steps:
        _log(run, rate, numbers.grad_norm)


def _warn_of_strength(run: Run, numbers: StepNumbers) -> None:
    """Say once where the penalty of the first step rules the loss of the task."""
    loss = numbers.loss_sum / max(1, numbers.targets)
    penalty = numbers.penalty / run.config.penalty.every
    if penalty > RULING_PENALTY * loss:
        run.progress.say(
            f"the first penalty, {penalty:.3g}, is {penalty / max(loss, 1e-30):.3g} times the loss of"
            f" the task, {loss:.3g}: it rules the training; most strengths in use begin below it",
            warn=True,
        )


def validate(run: Run) -> None:
    """Evaluate on *valid*, note whether these weights are the best so far, and keep them where they
    may be averaged."""
    state = run.state
    found = evaluate(run, "valid")
    better = state.record_evaluation(found, run.task)
    row = {"step": state.step, "split": "valid", **found.metrics, **run.task.watch(run.model)}
    run.add_row({**row, "best": better, "seconds": run.elapsed()})
    if run.history is not None:
        run.history.add(state.step, run.model, write=run.is_main)


def evaluate(run: Run, split: Literal["valid", "test"]) -> Evaluation:
    """Return the metrics of the weights of this moment on ``split``, on as many batches as the run
    reads.

    Status: exact. Sums and counts are added up in float64 over batches and processes, so the result
    does not depend on the batch size. Every process runs the model as often; what is run beyond the
    split is not counted. Dropout is off; no random number is drawn; the mode of the model is put
    back.

    Raises:
        Cancelled: the run was asked to stop on the way.
        DataError: the split is empty.
        Divergence: the loss is not finite.

    Cost: one forward pass over the split, or over its first batches.
    """
    order = run.task.batches(split, run.options.batch_size, seed=0, epoch=0)
    order = order[: run.options.eval_batches if split == "valid" else run.test_batches]
    if not order:
        raise DataError(
            f"{run.task.name}: the {split} split is empty; a run needs it to choose and report"
            " weights"
        )
    totals: dict[str, tuple[float, float]] = {}
    bad_batch: Batch | None = None
    rank, world = run.accelerator.process_index, run.accelerator.num_processes
    # As many batches in every process, as their calls wait for each other.
    mine = [order[min(first + rank, len(order) - 1)] for first in range(0, len(order), world)]
    was_training = run.prepared.training
    run.prepared.eval()
    try:
        batches = collated(run.task, split, mine, workers=run.options.num_workers)
        for number, batch in enumerate(batches):
            if run.stop_requested():
                raise Cancelled
            batch = to_device(batch, run.accelerator.device)
            sums = _batch_sums(run, batch)
            if number * world + rank >= len(order):
                sums = dict.fromkeys(sums, (0.0, 0.0))
            if bad_batch is None and not math.isfinite(sums["loss"][0]):
                bad_batch = batch
            for name, (value, count) in sums.items():
                before = totals.get(name, (0.0, 0.0))
                totals[name] = before[0] + value, before[1] + count
    finally:
        run.prepared.train(was_training)
    if world > 1:
        names = sorted(totals)
        each = torch.tensor([totals[name] for name in names], dtype=torch.float64)
        pairs = sum_over_processes(run.accelerator, each).tolist()
        totals = {name: (pair[0], pair[1]) for name, pair in zip(names, pairs, strict=True)}
    loss_sum, count = totals.pop("loss")
    loss = loss_sum / max(1.0, count)
    if not math.isfinite(loss):
        raise _bad_evaluation(run, split, loss, bad_batch)
    metrics = run.task.summarize(totals) if totals else {}
    return Evaluation({"loss": loss, **metrics}, sum(map(len, order)))


@torch.no_grad()
def _batch_sums(run: Run, batch: Batch) -> dict[str, tuple[float, float]]:
    with autocast(run.accelerator.device, run.options):
        logits = scaled(forward(run.prepared, batch), run.options)
        loss_sum, count = run.task.loss_sum(logits, batch)
    return {**run.task.metric_sums(logits, batch), "loss": (float(loss_sum), float(count))}


def _rate(run: Run, step: int) -> float:
    return learning_rate(step, run.options, run.config.model.hidden_size)


def _penalty_of_step(run: Run, penalty: Penalty | None) -> Penalty | None:
    """Return the penalty of this step; with ``every`` = k it is on at every k-th step and counts
    k-fold."""
    every = run.config.penalty.every
    if penalty is None or run.state.step % every:
        return None
    return penalty if every == 1 else lambda: penalty() * every


def _log(run: Run, rate: float, grad_norm: float) -> None:
    window, run.state.window = run.state.window, Window()
    row: dict[str, Any] = {"step": run.state.step, "split": "train"}
    row["loss"] = window.loss_sum / max(1, window.targets)
    row["penalty"] = window.penalty_sum / window.steps
    if window.auxiliary_sum is not None:
        row["auxiliary_loss"] = window.auxiliary_sum / window.steps
    row |= {**run.constraint_error(), "grad_norm": grad_norm, "learning_rate": rate}
    row["tokens_per_second"] = window.tokens / window.seconds
    run.add_row({**row, "seconds": run.elapsed()})


def _divergence(
    run: Run, numbers: StepNumbers, micro_batches: list[Batch], rate: float
) -> Divergence:
    run.optimizer.zero_grad(set_to_none=True)
    terms = {"loss": numbers.loss_sum, "penalty": numbers.penalty}
    terms |= {"auxiliary loss": numbers.auxiliary or 0.0, "gradient norm": numbers.grad_norm}
    bad = [f"{name} is {value}" for name, value in terms.items() if not math.isfinite(value)]
    found, whole = None, run.whole()
    for batch in micro_batches:
        losses = partial(_losses, run, whole, batch)
        found = found or first_nonfinite_module(whole.model, losses)
    step = run.state.step + 1
    return Divergence(step=step, learning_rate=rate, what=", ".join(bad), blame=found)


def _bad_evaluation(run: Run, split: str, loss: float, batch: Batch | None) -> Divergence:
    found, whole = None, run.whole()
    if batch is not None:
        whole.model.eval()
        found = first_nonfinite_module(whole.model, partial(_losses, run, whole, batch))
        whole.model.train()
    step, what = max(1, run.state.step), f"loss on {split} is {loss}"
    return Divergence(step=step, learning_rate=_rate(run, step), what=what, blame=found)


def _losses(run: Run, whole: UnshardedModel, batch: Batch) -> dict[str, torch.Tensor]:
    """Return every term of the loss of ``batch`` by the name that a message gives it."""
    batch = to_device(batch, run.accelerator.device)
    with autocast(run.accelerator.device, run.options):
        logits, auxiliary = forward_with_auxiliary(whole.model, batch)
        logits = scaled(logits, run.options)
        loss, _ = run.task.loss_sum(logits, batch, label_smoothing=run.options.label_smoothing)
    penalty = _penalty_of_step(run, whole.penalty)
    extra = None if penalty is None else penalty()
    found = {"(the loss)": loss, "(the auxiliary loss)": auxiliary, "(the penalty)": extra}
    return {name: value for name, value in found.items() if value is not None}
