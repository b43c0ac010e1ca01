"""The counters of a run: its position, without tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wellposed.errors import CheckpointError, ConfigError
from wellposed.options import build_options
from wellposed_lab.tasks.task import Task


@dataclass(frozen=True)
class Evaluation:
    """Metrics of a split (``loss`` among them), their number of examples, and ``notes`` on them."""

    metrics: dict[str, float]
    examples: int
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of one step; ``loss_sum / targets`` is the mean loss per target."""

    loss_sum: float
    targets: int
    penalty: float
    grad_norm: float
    tokens: int
    auxiliary: float | None = None
    """The model's own loss; None if it has none."""

    def not_finite(self) -> list[str]:
        """Return one phrase for each number that is not finite."""
        terms = {"loss": self.loss_sum, "penalty": self.penalty}
        terms |= {"auxiliary loss": self.auxiliary or 0.0, "gradient norm": self.grad_norm}
        return [f"{name} is {value}" for name, value in terms.items() if not math.isfinite(value)]


@dataclass
class Window:
    """Sums over the steps since the last row of ``metrics.jsonl``."""

    loss_sum: float = 0.0
    targets: int = 0
    penalty_sum: float = 0.0
    auxiliary_sum: float | None = None
    """None if the model has no loss of its own."""
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


GONE = ("loss_scale", "steps_at_scale")
"""Fields of older checkpoints for fp16, which are ignored."""
ADDED = ("penalty_pulls",)
"""Fields that older checkpoints lack."""


@dataclass
class TrainerState:
    """Position of a run; stored as ``trainer_state.json`` in every checkpoint."""

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
    processes: int = 1
    """Number of processes at the start; `batch_size` and `gradient_accumulation` are per process."""
    window: Window = field(default_factory=Window)
    penalty_pulls: dict[str, float] = field(default_factory=dict)
    """The largest norm of the penalty's own gradient that was read, by weight."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str) -> TrainerState:
        """Rebuild from the values of a checkpoint; other fields are a `CheckpointError`."""
        field_names = {item.name for item in dataclasses.fields(cls)}
        values = {name: value for name, value in values.items() if name not in GONE}
        different = set(values) ^ field_names
        if different - (field_names & set(ADDED)):
            raise CheckpointError(
                f"{where}: fields {sorted(different)} differ from what this version"
                " reads; continue with the version of wellposed that wrote it"
            )
        try:
            return build_options(cls, values, where=where)
        except ConfigError as error:
            raise CheckpointError(f"{error}; the file is damaged") from error

    def count(self, numbers: StepNumbers, seconds: float) -> None:
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

    def is_better(self, value: float, task: Task) -> bool:
        """Return whether a value of the headline metric beats the best so far."""
        best = self.best_value
        return best is None or (value > best if task.higher_is_better else value < best)

    def record_evaluation(self, evaluation: Evaluation, task: Task) -> bool:
        """Record a validation result at the present step; return whether it is the best so far."""
        self.evaluated_step = self.step
        value = evaluation.metrics[task.headline]
        if not self.is_better(value, task):
            self.evaluations_without_gain += 1
            return False
        self.best_step = self.step
        self.best_value = value
        self.best_metrics = evaluation.metrics
        self.best_examples = evaluation.examples
        self.evaluations_without_gain = 0
        return True
