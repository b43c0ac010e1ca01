"""One run: its objects and where it stands, its steps, evaluations and checkpoints, and where numbers
stop being finite."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from wellposed.errors import ConfigError, DataError, RoleNotFoundError
from wellposed.measurement import Monitor, measure, worst_vitals
from wellposed.penalize import large_penalty
from wellposed.tasks import Task
from wellposed.tasks.task import accuracy_sums
from wellposed.training.config import RunConfig, words_of
from wellposed.training.folder import checkpoints, durable_files, run_folder, tensors
from wellposed.training.folder.result import MetricsFile
from wellposed.training.folder.save import check_savable
from wellposed.training.loop import batches, build
from wellposed.training.loop import step as steps
from wellposed.training.loop.batches import Batch, MicroBatches
from wellposed.training.loop.divergence import Blame, Divergence, first_nonfinite_module
from wellposed.training.loop.machine import ShardedModel, sum_over_processes
from wellposed.training.loop.processes import Cancelled, StopRequest
from wellposed.training.loop.schedules import learning_rate
from wellposed.training.loop.state import Evaluation, TrainerState, Window
from wellposed.training.loop.tracking import Progress, Trackers
from wellposed.training.loop.word_margin import word_logits
from wellposed.training.start import Start

HELD = "accuracy_held"
"""Share of texts that are right whatever the K words of ``margin_loss = words:K``, as its loss reads
them."""


class Run:
    """Model, optimizer, penalty, constraint, counters and files of one run.

    `progress`, `stop`, `metrics` and `trackers` are open while it trains; `begin` makes `batches`
    and says how many `micro_batches` a step takes. Of *test* so many `test_batches` are read, all
    for None.
    """

    progress: Progress
    stop: StopRequest
    metrics: MetricsFile
    trackers: Trackers
    batches: MicroBatches
    micro_batches: int
    test_batches: int | None = None

    def __init__(
        self, config: RunConfig, out: Path, task: Task, model: nn.Module, accelerator: Accelerator
    ) -> None:
        check_savable(model, task)
        self.config, self.options, self.out, self.task = config, config.train, out, task
        self.accelerator = accelerator
        averaged = config.train.average_checkpoints
        self.history = checkpoints.WeightHistory(out, averaged) if averaged else None
        sharded = config.train.parallel == "fsdp" and accelerator.num_processes > 1
        if sharded and config.train.monitor:
            raise ConfigError(
                f"train.monitor = {config.train.monitor} with parallel = fsdp: weights that are cut over"
                f" {accelerator.num_processes} processes cannot be watched; leave it out, or take ddp"
            )
        # FSDP2 moves one block at a time to the device.
        self.model = (model if sharded else model.to(accelerator.device)).train()
        if config.train.gradient_checkpointing:
            build.enable_gradient_checkpointing(self.model)
        self.shards = ShardedModel(self.model, accelerator) if sharded else None
        self.penalty = build.build_penalty(config.penalty, self.model)
        constrained = build.constrained_weights(config.constrain, self.model)
        where = config.constrain.patterns if constrained else []
        self.optimizer = build.build_optimizer(
            self.model, config.train, constrained=constrained, where=where
        )
        # `prepared` is what runs forward (DistributedDataParallel wraps it); `model` is what is
        # saved and measured. The optimizer is used without Accelerate's wrapper: with no gradient
        # scaler it adds nothing but a search for packages at every step (0.5 ms).
        compiled: Any = torch.compile(self.model) if config.train.compile else self.model
        self.prepared: nn.Module = compiled if sharded else accelerator.prepare(compiled)
        self.constraint = build.build_constraint(config.constrain, self.model, self.optimizer)
        self.monitor = None
        if config.train.monitor and self.is_main:
            every = config.train.monitor
            self.monitor = Monitor(self.model, self.optimizer, every, weights=False)
        self.state = TrainerState()
        self.environment: dict[str, Any] = {}
        self.start: Start | None = None
        self._saved: tuple[int, int] | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files."""
        return self.accelerator.is_main_process

    @property
    def started(self) -> dict[str, Any]:
        """The entry ``started_from`` of ``train_info``; nothing where the run starts from no model."""
        if self.start is None:
            return {}
        names = {name: list(getattr(self.start, name)) for name in ("new_weights", "left_out")}
        names |= {"labels": self.start.labels} if self.start.labels else {}
        return {"started_from": {"model": self.config.start.model, **names}}

    def enter(self, resume: str, command: list[str] | None) -> tuple[Path | None, list[str]]:
        """Make or re-enter the run folder; return the checkpoint to load and notes for the user."""
        if not self.is_main:
            self.accelerator.wait_for_everyone()
            return run_folder.find_checkpoint(self.out, resume)
        checkpoint, notes = run_folder.enter_run_folder(self.out, self.config, resume)
        self.environment = run_folder.environment(command, self.task)
        # Of an earlier start: what it describes grows again, and a kill must leave none that is wrong.
        (self.out / durable_files.MANIFEST).unlink(missing_ok=True)
        step = checkpoints.step_of(checkpoint) if checkpoint else 0
        run_folder.write_environment(self.out, self.environment, step)
        self.accelerator.wait_for_everyone()
        return checkpoint, notes

    def begin(self, checkpoint: Path | None) -> None:
        """Take the place of ``checkpoint``, or of the first step.

        Raises:
            ConfigError: the micro-batches of a step cannot be shared out evenly.
        """
        options, rank = self.options, self.accelerator.process_index
        world = wrote = self.accelerator.num_processes
        if checkpoint is not None:
            # Processes that were not there when it was written draw from here on.
            torch.manual_seed(derived_seed(options.seed, f"dropout/{rank}/{checkpoint.name}"))
            given = (checkpoint, self.model, self.optimizer)
            self.state = checkpoints.load_checkpoint(*given, rank=rank)
            self._saved = self._moment
            if self.monitor is not None:
                self.monitor.steps = self.state.step
            wrote = checkpoints.random_count(checkpoint)
        else:
            if self.started:
                names = [name for name, _ in self.model.named_parameters()]
                self.progress.say(build.start_line(self.started["started_from"], names))
            self.state.processes = world
            self.measure("measure-initial.json")
            # Not the generator that drew the weights: dropout must not depend on how many numbers a
            # variant drew.
            torch.manual_seed(derived_seed(options.seed, f"dropout/{rank}"))
        state, begun_with = self.state, self.state.processes
        total = options.gradient_accumulation * begun_with
        if total % world:
            raise ConfigError(
                f"the run was begun by {begun_with} processes with gradient_accumulation"
                f" {options.gradient_accumulation}, so a step takes {total} micro-batches, which"
                f" {world} processes cannot share evenly; continue with a number of processes that"
                f" divides {total}"
            )
        self.micro_batches = total // world
        if wrote != world:
            self.progress.say(
                f"{checkpoint}: written by {wrote} processes, continued by {world}: a step still"
                f" takes {total} micro-batches, {self.micro_batches} in each process; dropout draws"
                " other numbers"
            )
        at = {"start": (state.epoch, state.batch_index), "process": (rank, world)}
        given = (self.task, options.batch_size, options.seed)
        self.batches = MicroBatches(*given, **at, workers=options.num_workers)
        self._began = time.monotonic() - state.seconds
        self.progress.start(state.step)

    def close(self) -> None:
        """End the workers, detach the penalty and the constraint and let go of the prepared
        objects."""
        if hasattr(self, "batches"):
            self.batches.close()
        for attached in (self.penalty, self.constraint, self.monitor):
            if attached is not None:
                attached.remove()
        if self.accelerator.device.type != "cpu":
            self.accelerator.free_memory()

    def save(self) -> None:
        """Write a checkpoint of this moment, unless it is the one written or loaded last."""
        if self._saved == self._moment:
            return
        state = self.state
        state.seconds = self.elapsed()
        state.metrics_rows = self.metrics.sync()
        random_states = gather_object([tensors.encode(*tensors.random_tensors())])
        what = (self.model, self.optimizer, state, random_states)
        files = checkpoints.snapshot(*what, keep=self.is_main)
        if self.is_main:
            checkpoints.write_checkpoint(self.out, state.step, files)
            keep = self.options.keep_checkpoints
            checkpoints.prune(self.out, step=state.step, keep=keep, best_step=state.best_step)
        self.accelerator.wait_for_everyone()
        self._saved = self._moment

    def measure(self, name: str) -> None:
        """Write the condition of every weight to the file ``name`` of the run folder; say why not,
        where the model has no roles."""

        if not self.is_main and self.shards is None:
            return
        try:
            found = measure(self.model)
        except RoleNotFoundError as error:
            self.progress.say(f"no {name}: {error}")
            return
        if self.is_main:
            with durable_files.replace_files(self.out) as there:
                found.to_json(there / name)

    def whole(self) -> nn.Module:
        """Return the model, or of sharded weights a copy that no gather is needed to run.

        Called by all processes alike.
        """
        if self.shards is None:
            return self.model
        return self.shards.whole(device=self.accelerator.device)

    def add_row(self, row: dict[str, Any]) -> None:
        """Add a row to ``metrics.jsonl`` and show it."""
        row = {**row, "seconds": self.elapsed()}
        self.metrics.append(row)
        self.progress.row(row)
        self.trackers.row(row)

    def elapsed(self) -> float:
        """Return the seconds of this run, those before it was interrupted included."""
        return time.monotonic() - self._began

    def stop_requested(self) -> bool:
        """Return whether any process was asked to stop, so that all of them stop at the same
        step."""
        if self.accelerator.num_processes == 1:
            return self.stop.requested
        return bool(sum_over_processes(self.accelerator, torch.tensor(int(self.stop.requested))))

    def best_evaluation(self) -> dict[str, Evaluation]:
        """Return the best evaluation so far by its split, or nothing before the first."""
        state = self.state
        best = Evaluation(state.best_metrics, state.best_examples)
        return {} if state.best_step is None else {"valid": best}

    def constraint_error(self) -> dict[str, float]:
        """Return how far the worst constrained weight is from its set, where there are any."""
        if self.constraint is None:
            return {}
        name = "isometry_error" if self.config.constrain.to == "orthogonal" else "constraint_error"
        return {name: self.constraint.error().worst}

    def watch(self) -> None:
        """Add a row of the vital signs of the step just taken, where one is due."""
        if self.monitor is None:
            return
        known = len(self.monitor.alarms)
        found = self.monitor.step()
        step, new = self.monitor.steps, self.monitor.alarms[known:]
        finite = {name: value for name, value in found.items() if math.isfinite(value)}
        if finite:
            self.add_row({"step": step, "split": "monitor", **worst_vitals(finite), **finite})
        broken = {f"vital/{each.name}/finite": 0.0 for each in new if math.isnan(each.value)}
        values = {each.name: each.value for each in new if not math.isnan(each.value)}
        alarms = {name: min(value, sys.float_info.max) for name, value in values.items()}
        if new:
            self.add_row({"step": step, "split": "alarm", **broken, **alarms})

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        own = getattr(getattr(self.model, "config", None), "hidden_size", None)
        return learning_rate(step, self.options, own or self.config.model.hidden_size)

    @property
    def _moment(self) -> tuple[int, int]:
        return self.state.step, self.state.evaluated_step


def derived_seed(seed: int, purpose: str) -> int:
    """Return a seed for one ``purpose``, unrelated to those of other purposes."""
    return int.from_bytes(sha256(f"{seed}/{purpose}".encode()).digest()[:7])


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
    rate = run.rate(state.step + 1)
    build.set_learning_rate(run.optimizer, rate)
    micro_batches = run.batches.take(run.micro_batches)
    random_states = tensors.torch_states()
    where = (run.accelerator, run.prepared, run.task)
    asked = {"penalty": _penalty_of_step(run, run.penalty), "check_targets": check_targets}
    asked |= {"progress": (state.step + 1) / options.steps}
    numbers = steps.compute_gradients(*where, micro_batches, options, **asked)
    if not numbers.finite:
        tensors.restore_torch_states(random_states)
        run.optimizer.zero_grad(set_to_none=True)
        run.watch()  # the first module whose output is not finite is an alarm of this step
        raise _divergence(run, numbers, micro_batches, rate)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    run.watch()
    state.epoch, state.batch_index = run.batches.epoch, run.batches.index
    state.count(numbers, time.perf_counter() - began)
    if state.step == 1:
        loss = numbers.loss_sum / max(1, numbers.targets)
        if said := large_penalty(numbers.penalty / run.config.penalty.every, loss):
            run.progress.say(said, warn=True)
    if state.step % options.log_every == 0 or state.step == options.steps:
        _log(run, rate, numbers.grad_norm)


def _log(run: Run, rate: float, grad_norm: float) -> None:
    window, run.state.window = run.state.window, Window()
    row: dict[str, Any] = {"step": run.state.step, "split": "train"}
    row["loss"] = window.loss_sum / max(1, window.targets)
    row["penalty"] = window.penalty_sum / window.steps
    if window.auxiliary_sum is not None:
        row["auxiliary_loss"] = window.auxiliary_sum / window.steps
    row |= {**run.constraint_error(), "grad_norm": grad_norm, "learning_rate": rate}
    run.add_row({**row, "tokens_per_second": window.tokens / window.seconds})


def validate(run: Run) -> None:
    """Evaluate on *valid*, note whether these weights are the best so far, and keep them where they
    may be averaged."""
    state = run.state
    found = evaluate(run, "valid")
    row = {"step": state.step, "split": "valid", **found.metrics, **run.task.watch(run.model)}
    run.add_row({**row, "best": state.record_evaluation(found, run.task)})
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
        problem = f"{run.task.name}: the {split} split is empty"
        raise DataError(f"{problem}; a run needs it to choose and report weights")
    totals: dict[str, tuple[float, float]] = {}
    bad: list[Batch] = []
    rank, world = run.accelerator.process_index, run.accelerator.num_processes
    # As many batches in every process, as their calls wait for each other.
    mine = [order[min(first + rank, len(order) - 1)] for first in range(0, len(order), world)]
    was_training = run.prepared.training
    run.prepared.eval()
    try:
        made = batches.collated(run.task, split, mine, workers=run.options.num_workers)
        for number, batch in enumerate(made):
            if run.stop_requested():
                raise Cancelled
            batch = batches.to_device(batch, run.accelerator.device)
            sums = _batch_sums(run, batch)
            if number * world + rank >= len(order):
                sums = dict.fromkeys(sums, (0.0, 0.0))
            if not bad and not math.isfinite(sums["loss"][0]):
                bad = [batch]
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
        step, blame = max(1, run.state.step), _blame(run, bad, training=False)
        what = f"loss on {split} is {loss}"
        raise Divergence(step=step, learning_rate=run.rate(step), what=what, blame=blame)
    metrics = run.task.summarize(totals) if totals else {}
    return Evaluation({"loss": loss, **metrics}, sum(map(len, order)))


@torch.no_grad()
def _batch_sums(run: Run, batch: Batch) -> dict[str, tuple[float, float]]:
    words, sums = words_of(run.options.margin_loss), {}
    with steps.autocast(run.accelerator.device, run.options):
        raw, _, output = batches.forward_with_auxiliary(run.prepared, batch)
        logits = steps.scaled(raw, run.options)
        loss_sum, count = run.task.loss_sum(logits, batch)
        if words:
            reached = word_logits(raw, batch, run.model, words, getattr(output, "votes", None))
            sums = {HELD: accuracy_sums(reached, batch["labels"])}
    sums |= run.task.metric_sums(logits, batch)
    return {**sums, "loss": (float(loss_sum), float(count))}


def _penalty_of_step(run: Run, penalty: steps.Penalty | None) -> steps.Penalty | None:
    """Return the penalty of this step; with ``every`` = k it is on at every k-th step and counts
    k-fold."""
    every = run.config.penalty.every
    if penalty is None or run.state.step % every:
        return None
    return penalty if every == 1 else lambda: penalty() * every


def _divergence(
    run: Run, numbers: steps.StepNumbers, again: list[Batch], rate: float
) -> Divergence:
    terms = {"loss": numbers.loss_sum, "penalty": numbers.penalty}
    terms |= {"auxiliary loss": numbers.auxiliary or 0.0, "gradient norm": numbers.grad_norm}
    bad = [f"{name} is {value}" for name, value in terms.items() if not math.isfinite(value)]
    step, blame = run.state.step + 1, _blame(run, again, training=True)
    return Divergence(step=step, learning_rate=rate, what=", ".join(bad), blame=blame)


def _blame(run: Run, again: Iterable[Batch], *, training: bool) -> Blame | None:
    """Run batches once more and name the module where numbers stop being finite; called by all
    processes alike."""
    model = run.whole().train(training)
    whole = run.penalty if model is run.model else build.build_penalty(run.config.penalty, model)
    penalty = _penalty_of_step(run, whole)
    losses = (partial(_losses, run, model, penalty, batch) for batch in again)
    found = (first_nonfinite_module(model, each) for each in losses)
    blame = next(filter(None, found), None)
    model.train()
    return blame


def _losses(
    run: Run, model: nn.Module, penalty: steps.Penalty | None, batch: Batch
) -> dict[str, Any]:
    """Return every term of the loss of ``batch`` by the name that a message gives it."""
    batch = batches.to_device(batch, run.accelerator.device)
    given = (model, model, run.task, batch, run.options)
    loss, _, auxiliary = steps.training_loss(
        *given, progress=(run.state.step + 1) / run.options.steps
    )
    extra = None if penalty is None else penalty()
    found = {"(the loss)": loss, "(the auxiliary loss)": auxiliary, "(the penalty)": extra}
    return {name: value for name, value in found.items() if value is not None}
