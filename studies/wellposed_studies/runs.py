"""The trainings behind tables and figures: a grid of runs, each trained once and read back; free of
torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellposed.charts import Series
from wellposed.compare.runs import PlannedRun, train_planned
from wellposed.recipes.recipe import Request
from wellposed.statistics import mean_and_standard_error
from wellposed.training.config import RunConfig
from wellposed_studies.verdicts import levelled_off

if TYPE_CHECKING:
    from wellposed.tasks import Task
    from wellposed.training import RunResult


@dataclass(frozen=True)
class FinishedRun:
    """A training that ended, and what its folder says about it."""

    config: RunConfig
    folder: Path
    metrics: Mapping[str, float] = field(default_factory=dict)
    """``accuracy,test`` and so on, of the best weights; empty where training diverged."""
    reference: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the best predictor that does not look at its input."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """``train_info`` of result.json: steps, seconds, parameters, why it failed."""

    @classmethod
    def of(cls, result: RunResult) -> FinishedRun:
        """Return what a result says; a run that the user stopped is a KeyboardInterrupt."""
        if result.status == "cancelled":
            raise KeyboardInterrupt
        values = result.result
        config = RunConfig.from_dict(values["config"], where=f"{result.out}/result.json")
        metrics = values["results"][config.task] if result.status == "success" else {}
        return cls(config, result.out, metrics, values["reference"], values["train_info"])

    @property
    def variant(self) -> str:
        """Name of the variant, with its value where it has one."""
        return self.config.variant

    @property
    def seed(self) -> int:
        """Seed of weights, batches and dropout."""
        return self.config.train.seed

    @property
    def depth(self) -> int:
        """Number of layers."""
        return self.config.model.num_hidden_layers

    @property
    def failure(self) -> str:
        """Why training failed; empty where it did not."""
        return "" if self.metrics else str(self.info.get("reason", ""))

    def metric(self, name: str, missing: float = math.nan) -> float:
        """Return a metric, or ``missing`` where training diverged."""
        return float(self.metrics[name]) if self.metrics else missing

    @property
    def settled(self) -> bool:
        """Whether training did not fail and its loss on *valid* had levelled off."""
        from wellposed.training import learning_rate

        if self.failure:
            return False
        train, width = self.config.train, self.config.model.hidden_size
        spent = [
            0.0,
            *accumulate(learning_rate(step, train, width) for step in range(1, train.steps + 1)),
        ]
        curve = self.curve("valid")
        return levelled_off(
            [loss for _, loss in curve], [spent[step] / spent[-1] for step, _ in curve]
        )

    def losses(self) -> list[tuple[int, str, float]]:
        """Return (step, split, loss) of train and valid wherever a finite loss was logged, in the
        order of training."""
        from wellposed.training import read_metrics

        logged = [
            (int(row["step"]), row["split"], float(row["loss"]))
            for row in read_metrics(self.folder)
        ]
        return [
            point for point in logged if point[1] in ("train", "valid") and math.isfinite(point[2])
        ]

    def curve(self, split: str) -> list[tuple[int, float]]:
        """Return step and loss of one split."""
        return [(step, loss) for step, name, loss in self.losses() if name == split]


def train_grid(
    request: Request,
    planned: Iterable[PlannedRun],
    *,
    task: Task | None = None,
    test_batches: int | None = None,
) -> list[FinishedRun]:
    """Train every planned run, or load it where it is finished."""
    results = train_planned(
        planned,
        announce=request.announce,
        task=task,
        test_batches=test_batches,
        jobs=request.jobs or 1,
    )
    return [FinishedRun.of(result) for result in results]


def depths_trained(runs: Sequence[FinishedRun], trains: Callable[[FinishedRun], bool]) -> list[int]:
    """Return the depths at which every run trains."""
    failed = {run.depth for run in runs if not trains(run)}
    return [depth for depth in dict.fromkeys(run.depth for run in runs) if depth not in failed]


def curves(
    runs: Iterable[FinishedRun], split: str, label: Callable[[FinishedRun], str]
) -> list[Series]:
    """Return the loss of each run over its steps."""
    found = [(label(run), run.curve(split)) for run in runs]
    return [
        Series(name, [step for step, _ in curve], [loss for _, loss in curve])
        for name, curve in found
    ]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard error; the error of one value, or of values that are not all finite,
    is nan.

    >>> mean_and_error([1.0, 3.0]), mean_and_error([-math.inf, 1.0])
    ((2.0, 1.0), (-inf, nan))
    """
    if not all(map(math.isfinite, values)):
        return statistics.fmean(values), math.nan
    mean, error = mean_and_standard_error(values)
    return mean, math.nan if error is None else error


def spanned(values: Sequence[float]) -> str:
    """Return the least and the greatest value as text, or the one there is.

    >>> spanned([2.345, 1.0, 120.4]), spanned([0.5])
    ('1 to 120', '0.5')
    """
    ends = dict.fromkeys(f"{value:.3g}" for value in (min(values), max(values)))
    return " to ".join(ends)


def plus_minus(value: tuple[float, float | None], digits: int = 2) -> str:
    """Return mean and standard error as text, the mean alone where there is no error.

    >>> plus_minus((1.25, 0.5)), plus_minus((1.25, None), 1)
    ('1.25 +- 0.50', '1.2')
    """
    mean, error = value
    return f"{mean:.{digits}f}" if error is None else f"{mean:.{digits}f} +- {error:.{digits}f}"
