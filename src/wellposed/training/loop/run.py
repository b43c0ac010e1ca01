"""The objects of one run, and where it stands; what its steps and its end do with them is in other
files."""

from __future__ import annotations

import time
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import nn

from wellposed.training.config import RunConfig
from wellposed.training.folder import checkpoints, manifest, run_folder
from wellposed.training.folder.averaging import weight_history
from wellposed.training.folder.metrics import MetricsFile
from wellposed.training.folder.run_folder import environment_of
from wellposed.training.folder.save import measure_model
from wellposed.training.folder.tensors import gather_bytes
from wellposed.training.loop import build
from wellposed.training.loop.batches import MicroBatches, micro_batches_of_process
from wellposed.training.loop.machine import ShardedModel, is_sharded_run
from wellposed.training.loop.processes import StopRequest
from wellposed.training.loop.progress import Progress
from wellposed.training.loop.state import Evaluation, TrainerState
from wellposed.training.loop.step import sum_over_processes
from wellposed.training.loop.tracking import NOT_TRACKED, Trackers, Tracking

if TYPE_CHECKING:
    from wellposed.tasks import Task


class UnshardedModel(NamedTuple):
    """A model that this process can run alone, and the penalty on it."""

    model: nn.Module
    penalty: Any | None


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
        self.config, self.options, self.out, self.task = config, config.train, out, task
        self.accelerator = accelerator
        self.history = weight_history(config, out)
        sharded = is_sharded_run(config.train, accelerator)
        # FSDP2 moves one block at a time to the device.
        self.model = (model if sharded else model.to(accelerator.device)).train()
        if config.train.gradient_checkpointing:
            build.enable_gradient_checkpointing(self.model)
        self._shards = ShardedModel(self.model, accelerator) if sharded else None
        self.penalty = build.build_penalty(config.penalty, self.model)
        constrained = build.constrained_weights(config.constrain, self.model)
        self.optimizer = build.build_optimizer(
            self.model, config.train, constrained=constrained, where=config.constrain.patterns
        )
        # `prepared` is what runs forward (DistributedDataParallel wraps it); `model` is what is
        # saved and measured. The optimizer is used without Accelerate's wrapper: with no gradient
        # scaler it adds nothing but a search for packages at every step (0.5 ms).
        compiled: Any = torch.compile(self.model) if config.train.compile else self.model
        self.prepared: nn.Module = compiled if sharded else accelerator.prepare(compiled)
        self.constraint = build.build_constraint(config.constrain, self.model, self.optimizer)
        self.state = TrainerState()
        self.environment: dict[str, Any] = {}
        self.started: dict[str, Any] = {}
        self._saved: tuple[int, int] | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files."""
        return self.accelerator.is_main_process

    def enter(self, resume: str, command: list[str] | None) -> tuple[Path | None, list[str]]:
        """Make or re-enter the run folder; return the checkpoint to load and notes for the user."""
        if not self.is_main:
            self.accelerator.wait_for_everyone()
            return run_folder.find_checkpoint(self.out, resume)
        checkpoint, notes = run_folder.enter_run_folder(self.out, self.config, resume)
        self.environment = environment_of(self.task, command)
        manifest.remove(self.out)  # of an earlier start: what it describes grows again
        step = checkpoints.step_of(checkpoint) if checkpoint else 0
        run_folder.write_environment(self.out, self.environment, step)
        self.accelerator.wait_for_everyone()
        return checkpoint, notes

    def begin(self, checkpoint: Path | None) -> None:
        """Take the place of ``checkpoint``, or of the first step."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        if checkpoint is not None:
            # Processes that were not there when it was written draw from here on.
            torch.manual_seed(derived_seed(self.options.seed, f"dropout/{rank}/{checkpoint.name}"))
            given = (checkpoint, self.model, self.optimizer)
            self.state = checkpoints.load_checkpoint(*given, rank=rank)
            self._saved = self._moment
        else:
            if self.started:
                names = [name for name, _ in self.model.named_parameters()]
                self.progress.say(build.start_line(self.started["started_from"], names))
            self.state.processes = world
            self.measure("measure-initial.json")
            # Not the generator that drew the weights: dropout must not depend on how many numbers a
            # variant drew.
            torch.manual_seed(derived_seed(self.options.seed, f"dropout/{rank}"))
        state, options = self.state, self.options
        self.micro_batches = micro_batches_of_process(
            options.gradient_accumulation, begun_with=state.processes, processes=world
        )
        if checkpoint is not None and world != checkpoints.random_count(checkpoint):
            self.progress.say(
                f"{checkpoint}: written by {checkpoints.random_count(checkpoint)} processes,"
                f" continued by {world}: a step still takes {world * self.micro_batches}"
                f" micro-batches, {self.micro_batches} in each process; dropout draws other numbers"
            )
        position = {"epoch": state.epoch, "index": state.batch_index, "rank": rank, "world": world}
        self.batches = MicroBatches(
            self.task, options.batch_size, options.seed, workers=options.num_workers, **position
        )
        self._began = time.monotonic() - state.seconds
        self.progress.start(state.step)

    def close(self) -> None:
        """End the workers, detach the penalty and the constraint and let go of the prepared
        objects."""
        if hasattr(self, "batches"):
            self.batches.close()
        for attached in (self.penalty, self.constraint):
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
        random_states = gather_bytes(self.accelerator, checkpoints.random_snapshot())
        if self.is_main:
            what = (self.model, self.optimizer, state, random_states)
            checkpoints.write_checkpoint(self.out, checkpoints.take_snapshot(*what))
            keep = self.options.keep_checkpoints
            checkpoints.prune(self.out, step=state.step, keep=keep, best_step=state.best_step)
        elif self._shards is not None:
            checkpoints.join_snapshot(self.model, self.optimizer)
        self.accelerator.wait_for_everyone()
        self._saved = self._moment

    def measure(self, name: str) -> None:
        """Write the condition of every weight to the file ``name`` of the run folder."""
        if self.is_main or self._shards is not None:
            problem = measure_model(self.model, self.out / name, write=self.is_main)
            if problem:
                self.progress.say(problem)

    def whole(self) -> UnshardedModel:
        """Return the model and its penalty, or of sharded weights copies that no gather is needed
        to run.

        Called by all processes alike.
        """
        if self._shards is None:
            return UnshardedModel(self.model, self.penalty)
        model = self._shards.whole(device=self.accelerator.device)
        return UnshardedModel(model, build.build_penalty(self.config.penalty, model))

    def whole_to_save(self) -> nn.Module | None:
        """Return the model with all of its weights in the process that writes files, None in the
        others."""
        if self._shards is not None:
            return self._shards.whole(device="cpu") if self.is_main else self._shards.join_whole()
        return self.model if self.is_main else None

    def add_row(self, row: dict[str, Any]) -> None:
        """Add a row to ``metrics.jsonl`` and show it."""
        self.metrics.append(row)
        self.progress.row(row)
        self.trackers.row(row)

    def open_trackers(self, tracking: Tracking) -> Trackers:
        """Open the records of this run, in the process that writes its files."""
        config = self.config
        title = f"{config.task} {config.variant} seed {config.train.seed}"
        how = {"title": title, "config": config.to_dict(), "step": self.state.step}
        warn = partial(self.progress.say, warn=True)
        return Trackers(tracking if self.is_main else NOT_TRACKED, self.out, warn=warn, **how)

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

    @property
    def _moment(self) -> tuple[int, int]:
        return self.state.step, self.state.evaluated_step


def derived_seed(seed: int, purpose: str) -> int:
    """Return a seed for one ``purpose``, unrelated to those of other purposes."""
    return int.from_bytes(sha256(f"{seed}/{purpose}".encode()).digest()[:7])
