"""One run: its model with all training parts, its position, and its messages to the user."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from wellposed.errors import ConfigError, RoleNotFoundError
from wellposed.measurement import measure
from wellposed.roles import Roles, find_roles
from wellposed_lab.tasks.task import Task
from wellposed_lab.training.config import RunConfig
from wellposed_lab.training.folder import atomic, checkpoints
from wellposed_lab.training.folder.run_folder import RunFolder
from wellposed_lab.training.folder.save import check_savable, is_ours
from wellposed_lab.training.folder.state import TrainerState
from wellposed_lab.training.loop import build
from wellposed_lab.training.loop.batches import MicroBatches
from wellposed_lab.training.loop.machine import sum_over_processes
from wellposed_lab.training.loop.penalties import Due, build_penalty
from wellposed_lab.training.loop.penalty_pull import penalty_moves
from wellposed_lab.training.loop.processes import StopRequest
from wellposed_lab.training.loop.schedules import learning_rate
from wellposed_lab.training.loop.tracking import Progress, Trackers


class Parts:
    """A model with its optimizer, penalty, constraint and monitor. ``prepared`` runs forward
    (perhaps DistributedDataParallel), ``model`` is saved and measured. Accelerate does not wrap the
    optimizer: that only adds a search for packages to every step (0.5 ms)."""

    def __init__(
        self, config: RunConfig, task: Task, model: nn.Module, accelerator: Accelerator
    ) -> None:
        check_savable(model, task)
        train = config.train
        self.accelerator = accelerator
        self.model = model.to(accelerator.device).train()
        if train.gradient_checkpointing:
            build.enable_gradient_checkpointing(self.model)
        self.reparametrized = build.reparametrize(config.start, self.model)
        self.penalty = build_penalty(config.penalty, self.model)
        constrained = build.constrained_weights(config.constrain, self.model)
        where = config.constrain.patterns if constrained else []
        self.optimizer = build.build_optimizer(
            self.model, train, constrained=constrained, where=where
        )
        compiled: Any = torch.compile(self.model) if train.compile else self.model
        self.prepared: nn.Module = accelerator.prepare(compiled)
        self.constraint = build.build_constraint(config.constrain, self.model, self.optimizer)
        self.monitor = None
        if train.monitor and accelerator.is_main_process:
            from wellposed.measurement import Monitor

            self.monitor = Monitor(self.model, self.optimizer, train.monitor, weights=False)

    def close(self) -> None:
        """Detach penalty, constraint and monitor, and free the prepared objects."""
        for attached in (self.penalty, self.constraint, self.monitor):
            if attached is not None:
                attached.remove()
        if self.accelerator.device.type != "cpu":
            self.accelerator.free_memory()


class Run:
    """A run at ``checkpoint``, or before its first step; open until `close`.

    The ``folder`` is already entered, the ``checkpoint`` verified. Trackers named by ``tracking``
    receive each row. Entries of ``train_info`` about the start model are ``started``. From *test*,
    ``test_batches`` are read (None: all). A changed number of processes is a `ConfigError`.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        task: Task,
        parts: Parts,
        *,
        progress: Progress,
        stop: StopRequest,
        environment: dict[str, Any],
        checkpoint: Path | None = None,
        tracking: Sequence[str] = (),
        started: dict[str, Any] | None = None,
        test_batches: int | None = None,
    ) -> None:
        self.config = config
        self.options = config.train
        self.folder = folder
        self.task = task
        self.parts = parts
        self.progress = progress
        self.stop = stop
        self.environment = environment
        self.started = started or {}
        self.test_batches = test_batches
        rank = parts.accelerator.process_index
        world = parts.accelerator.num_processes
        draws = f"dropout/{rank}" + (f"/{checkpoint.name}" if checkpoint else "")
        self.state = TrainerState(processes=world)
        self._saved = (-1, -1)
        if checkpoint is None:
            self.measure("measure-initial.json")

        # Dropout must not depend on the random numbers that a variant drew for its weights.
        torch.manual_seed(derived_seed(self.options.seed, draws))
        if checkpoint is not None:
            self.state = checkpoints.load_checkpoint(
                checkpoint, parts.model, parts.optimizer, rank=rank
            )
            self._saved = self._moment
            if parts.monitor is not None:
                parts.monitor.steps = self.state.step

        if self.state.processes != world:
            raise ConfigError(
                f"the run was begun by {self.state.processes} processes, received {world}; continue with"
                f" {self.state.processes}"
            )

        self.batches = MicroBatches(
            task,
            self.options.batch_size,
            self.options.seed,
            start=(self.state.epoch, self.state.batch_index),
            process=(rank, world),
        )
        self._began = time.monotonic() - self.state.seconds
        progress.start(self.state.step)
        self.metrics = folder.metrics(self.state.metrics_rows)
        names = tracking if folder.writes else ()
        self.trackers = Trackers(names, folder.path, config.to_dict(), progress.warn)

    def close(self) -> None:
        self.trackers.close()
        self.metrics.close()

    def save(self) -> None:
        """Write a checkpoint, unless this state was just written or loaded."""
        if self._saved == self._moment:
            return
        state = self.state
        parts = self.parts
        state.seconds = self.elapsed()
        state.metrics_rows = self.metrics.sync()
        random_states = gather_object([checkpoints.encode(*checkpoints.random_tensors())])
        if self.folder.writes:
            files = checkpoints.snapshot(parts.model, parts.optimizer, state, random_states)
            self.folder.save(files, state, keep=self.options.keep_checkpoints)
        parts.accelerator.wait_for_everyone()
        self._saved = self._moment

    def measure(self, name: str) -> None:
        """Write the conditioning of every weight to the file ``name``, if there are roles."""
        if not self.folder.writes:
            return
        try:
            measurement = measure(self.parts.model, roles=self._roles)
        except RoleNotFoundError as error:
            self.progress.say(f"no {name}: {error}")
            return
        with atomic.replace_files(self.folder.path) as temporary:
            measurement.to_json(temporary / name)

    def add_row(self, row: dict[str, Any]) -> None:
        row = {**row, "seconds": self.elapsed()}
        self.metrics.append(row)
        self.progress.row(row)
        self.trackers.row(row)

    def elapsed(self) -> float:
        """Return the seconds of this run, including those before an interruption."""
        return time.monotonic() - self._began

    def stop_requested(self) -> bool:
        """Return whether any process was asked to stop, so that all stop at the same step."""
        requested = self.stop.requested
        accelerator = self.parts.accelerator
        if accelerator.num_processes == 1:
            return requested
        return bool(sum_over_processes(accelerator, torch.tensor(int(requested))))

    def constraint_error(self) -> dict[str, float]:
        """Return how far the worst constrained weight is from its set, if there are any."""
        if self.parts.constraint is None:
            return {}
        name = "isometry_error" if self.config.constrain.to == "orthogonal" else "constraint_error"
        return {name: self.parts.constraint.error().worst}

    def reads_pulls(self) -> bool:
        """Return whether the next step reads the penalty's own gradient: the first and the last step
        with a penalty. The backward pass of a compiled model runs only once."""
        penalties = self.parts.penalty
        if penalties is None or self.options.compile:
            return False
        return self.state.step in (0, penalties.last_step(self.options.steps))

    def penalty_moves(self) -> dict[str, float]:
        """Return about how far the penalty moves the weights, as a part of their size, if known."""
        summed = sum(map(self.rate, range(1, self.state.step + 1)))
        moves = penalty_moves(
            self.state.penalty_pulls, self.parts.model, self.parts.optimizer, summed
        )
        return {} if moves is None else {"penalty_moves": moves}

    def watch(self) -> None:
        """Add a row of vital signs of the last step, if one is due."""
        monitor = self.parts.monitor
        if monitor is None:
            return
        from wellposed.measurement import worst_vitals

        alarms_before = len(monitor.alarms)
        vitals = monitor.step()
        step = monitor.steps
        new = monitor.alarms[alarms_before:]
        finite = {name: value for name, value in vitals.items() if math.isfinite(value)}
        if finite:
            self.add_row({"step": step, "split": "monitor", **worst_vitals(finite), **finite})
        broken = {f"vital/{alarm.name}/finite": 0.0 for alarm in new if math.isnan(alarm.value)}
        values = {alarm.name: alarm.value for alarm in new if not math.isnan(alarm.value)}
        alarms = {name: min(value, sys.float_info.max) for name, value in values.items()}
        if new:
            self.add_row({"step": step, "split": "alarm", **broken, **alarms})

    def rate(self, step: int) -> float:
        width = getattr(getattr(self.parts.model, "config", None), "hidden_size", None)
        return learning_rate(step, self.options, width or self.config.model.hidden_size)

    def penalties_of_step(self) -> Due:
        """Return the penalties of the next step."""
        penalties = self.parts.penalty
        return Due(None, None) if penalties is None else penalties.of_step(self.state.step)

    def progress_of_step(self) -> float:
        """Return the fraction of the steps that is done after the next one."""
        return (self.state.step + 1) / self.options.steps

    @cached_property
    def _roles(self) -> Roles:
        """The roles of the weights. Our own models need only names; other models are run."""
        model = self.parts.model
        return find_roles(model, run=not is_ours(model))

    @property
    def _moment(self) -> tuple[int, int]:
        return self.state.step, self.state.evaluated_step


def derived_seed(seed: int, purpose: str) -> int:
    """Return a seed for one ``purpose``, independent of the others."""
    return int.from_bytes(sha256(f"{seed}/{purpose}".encode()).digest()[:7])
