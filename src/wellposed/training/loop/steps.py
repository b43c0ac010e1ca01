"""The training loop: steps, evaluations and checkpoints, and what is said where the numbers stop
being finite."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Literal

import torch

from wellposed.errors import DataError
from wellposed.training.folder.tensors import restore_torch_states, torch_states
from wellposed.training.loop.batches import Batch, forward_with_auxiliary, to_device
from wellposed.training.loop.divergence import NOT_REPEATED, Divergence, find_blame
from wellposed.training.loop.evaluate import Evaluation, evaluate
from wellposed.training.loop.optimizer import set_learning_rate
from wellposed.training.loop.schedules import learning_rate
from wellposed.training.loop.signals import Cancelled
from wellposed.training.loop.state import Window
from wellposed.training.loop.step import Penalty, StepNumbers, autocast, compute_gradients, scaled

if TYPE_CHECKING:
    from wellposed.training.loop.run import Run, Whole


RULING_PENALTY = 10.0
"""Times the loss of the task at which the first penalty is spoken of."""


def fit(run: Run) -> None:
    """Alternate steps with evaluations and checkpoints; a run can resume from any state at the top
    of the loop.

    Raises:
        Cancelled: the run was asked to stop.
        Divergence: a loss or gradient is not finite.
    """
    state, options = run.state, run.options
    check_targets = True
    while True:
        last = state.step >= options.steps
        if state.evaluated_step < state.step and (last or state.step % options.eval_every == 0):
            validate(run)
        last = last or (
            options.patience is not None and state.evaluations_without_gain >= options.patience
        )
        if (
            last
            or state.step == state.best_step
            or (state.step and state.step % options.checkpoint_every == 0)
        ):
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
    while True:
        numbers = compute_gradients(
            run.accelerator,
            run.prepared,
            run.task,
            micro_batches,
            options,
            penalty=_penalty_of_step(run, run.penalty),
            check_targets=check_targets,
            loss_scale=state.loss_scale if scaled_loss else 1.0,
        )
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
    loss, penalty = numbers.loss_sum / max(1, numbers.targets), numbers.penalty
    penalty /= run.config.penalty.every
    if penalty > RULING_PENALTY * loss:
        run.progress.say(
            f"the first penalty, {penalty:.3g}, is {penalty / max(loss, 1e-30):.3g} times the loss of"
            f" the task, {loss:.3g}: it rules the training; most strengths in use begin below it",
            warn=True,
        )


def validate(run: Run) -> None:
    """Evaluate on *valid*, note whether these weights are the best so far, and keep them where they
    may be averaged."""
    state, task = run.state, run.task
    found = evaluate_split(run, "valid")
    better = state.record_evaluation(
        found.metrics[task.headline],
        found.metrics,
        found.examples,
        higher_is_better=task.higher_is_better,
    )
    row = {
        "step": state.step,
        "split": "valid",
        **found.metrics,
        "best": better,
        "seconds": run.elapsed(),
    }
    run.add_row(row)
    if run.history is not None:
        run.history.add(state.step, run.model, write=run.is_main)


def evaluate_split(run: Run, split: Literal["valid", "test"]) -> Evaluation:
    """Evaluate the weights of this moment on ``split``, on as many batches of it as the run reads.

    Raises:
        Cancelled: the run was asked to stop on the way.
        DataError: the split is empty.
        Divergence: the loss is not finite.
    """
    found = evaluate(
        run.accelerator,
        run.prepared,
        run.task,
        split,
        run.options,
        max_batches=run.options.eval_batches if split == "valid" else run.test_batches,
        stop=run.stop_requested,
    )
    if found is None:
        raise Cancelled
    if found.examples == 0:
        raise DataError(
            f"{run.task.name}: the {split} split is empty; a run needs it to choose and report"
            " weights"
        )
    if not math.isfinite(found.metrics["loss"]):
        raise _bad_evaluation(run, split, found)
    return found


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
    row: dict[str, Any] = {
        "step": run.state.step,
        "split": "train",
        "loss": window.loss_sum / max(1, window.targets),
        "penalty": window.penalty_sum / window.steps,
        **(
            {}
            if window.auxiliary_sum is None
            else {"auxiliary_loss": window.auxiliary_sum / window.steps}
        ),
        **run.constraint_error(),
        "grad_norm": grad_norm,
        "learning_rate": rate,
        "tokens_per_second": window.tokens / window.seconds,
        "seconds": run.elapsed(),
    }
    run.add_row(row)


def _divergence(
    run: Run, numbers: StepNumbers, micro_batches: list[Batch], rate: float
) -> Divergence:
    run.optimizer.zero_grad(set_to_none=True)
    terms = {
        "loss": numbers.loss_sum, "penalty": numbers.penalty, "auxiliary loss": numbers.auxiliary or 0.0,
        "gradient norm": numbers.grad_norm,
    }  # fmt: skip
    what = ", ".join(
        f"{name} is {value}" for name, value in terms.items() if not math.isfinite(value)
    )
    found, whole = None, run.whole()
    for batch in micro_batches:
        found = found or find_blame(whole.model, lambda batch=batch: _losses(run, whole, batch))
    return Divergence(
        step=run.state.step + 1, learning_rate=rate, what=what, blame=found or NOT_REPEATED
    )


def _bad_evaluation(run: Run, split: str, evaluation: Evaluation) -> Divergence:
    found, batch, whole = None, evaluation.bad_batch, run.whole()
    if batch is not None:
        whole.model.eval()
        found = find_blame(whole.model, lambda: _losses(run, whole, batch))
        whole.model.train()
    step = max(1, run.state.step)
    what = f"loss on {split} is {evaluation.metrics['loss']}"
    return Divergence(
        step=step, learning_rate=_rate(run, step), what=what, blame=found or NOT_REPEATED
    )


def _losses(run: Run, whole: Whole, batch: Batch) -> dict[str, torch.Tensor]:
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
