"""The counters of a run, everything about its position that is not a tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wellposed.errors import CheckpointError, ConfigError
from wellposed.options import build_options
from wellposed.tasks import Task

if TYPE_CHECKING:
    from wellposed.training.loop.step import StepNumbers


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one split (``loss`` among them), and how many examples they are over.

    ``notes`` are entries of ``result.json`` about how the metrics came about.
    """

    metrics: dict[str, float]
    examples: int
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass
class Window:
    """Sums over the steps since the last row of ``metrics.jsonl``."""

    loss_sum: float = 0.0
    targets: int = 0
    penalty_sum: float = 0.0
    auxiliary_sum: float | None = None
    """None where the model has no loss of its own."""
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


FIRST_SCALE, LARGEST_SCALE, STEPS_TO_DOUBLE = 2.0**16, 2.0**24, 2000
"""Of the loss in fp16 (Micikevicius et al. 2018, section 3.2), with the numbers of torch's
scaler."""
ADDED = {"loss_scale": FIRST_SCALE, "steps_at_scale": 0}
"""What checkpoints written before fp16 lack."""


@dataclass
class TrainerState:
    """Where a run stands; stored as ``trainer_state.json`` in every checkpoint."""

    step: int = 0
    epoch: int = 0
    batch_index: int = 0
    evaluated_step: int = 0
    best_step: int | None = None
    best_value: float | None = None
    best_metrics: dict[str, float] = field(default_factory=dict)
    best_examples: int = 0
    evaluations_without_gain: int = 0
    tokens: int = 0
    seconds: float = 0.0
    train_seconds: float = 0.0
    metrics_rows: int = 0
    loss_scale: float = FIRST_SCALE
    """By what the loss of the next step is multiplied in fp16; other precisions leave it alone."""
    steps_at_scale: int = 0
    processes: int = 1
    """How many the run began with; `batch_size` and `gradient_accumulation` are per process of
    these."""
    window: Window = field(default_factory=Window)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str) -> TrainerState:
        """Rebuild from the values of a checkpoint; another set of fields is a `CheckpointError`."""
        known = {item.name for item in dataclasses.fields(cls)}
        values = {**ADDED, **values}
        if set(values) != known:
            raise CheckpointError(
                f"{where}: fields {sorted(set(values) ^ known)} differ from what this version"
                " reads; continue with the version of wellposed that wrote it"
            )
        try:
            return build_options(cls, values, where=where)
        except ConfigError as error:
            raise CheckpointError(f"{error}; the file is damaged") from error

    def count(self, numbers: StepNumbers, seconds: float) -> None:
        """Add the numbers of one step."""
        window = self.window
        window.loss_sum += numbers.loss_sum
        window.targets += numbers.targets
        window.penalty_sum += numbers.penalty
        if numbers.auxiliary is not None:
            window.auxiliary_sum = (window.auxiliary_sum or 0.0) + numbers.auxiliary
        window.steps += 1
        window.tokens += numbers.tokens
        window.seconds += seconds
        self.tokens += numbers.tokens
        self.train_seconds += seconds

    def lower_scale(self) -> None:
        """Halve the scale of the loss, whose gradient was not finite."""
        self.loss_scale, self.steps_at_scale = self.loss_scale / 2, 0

    def count_scaled_step(self) -> None:
        """Note a step whose scaled gradient was finite; after many of them the scale is doubled."""
        self.steps_at_scale += 1
        if self.steps_at_scale == STEPS_TO_DOUBLE:
            self.loss_scale, self.steps_at_scale = min(2 * self.loss_scale, LARGEST_SCALE), 0

    def is_better(self, value: float, task: Task) -> bool:
        """Return whether a value of the headline metric is better than the best so far."""
        best = self.best_value
        return best is None or (value > best if task.higher_is_better else value < best)

    def record_evaluation(self, found: Evaluation, task: Task) -> bool:
        """Note a validation result at the present step; return whether it is the best so far."""
        self.evaluated_step = self.step
        value = found.metrics[task.headline]
        if not self.is_better(value, task):
            self.evaluations_without_gain += 1
            return False
        self.best_step, self.best_value, self.best_metrics = self.step, value, found.metrics
        self.best_examples, self.evaluations_without_gain = found.examples, 0
        return True
