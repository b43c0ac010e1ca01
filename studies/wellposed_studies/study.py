"""What the studies share: how much is trained, runs that are trained once and read back, means with
their errors."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellposed.charts import Row, Series, Style, where
from wellposed.compare.runs import PlannedRun, train_planned
from wellposed.recipes.recipe import Request
from wellposed.statistics import Failure, SeedResults, mean_and_standard_error
from wellposed.training.config import ModelOptions, RunConfig, TrainOptions
from wellposed_studies.verdicts import levelled_off

if TYPE_CHECKING:
    from wellposed.tasks import Task
    from wellposed.training import RunResult

FACTORS = (1 / 3, 1.0, 3.0)
"""The rates that a model tries, in units of its own usual one."""


@dataclass(frozen=True)
class Sizes:
    """What is trained at a scale; a study reads the fields that it sets."""

    steps: int = 1
    seeds: int = 1
    width: int = 64
    layers: int = 2
    heads: int = 4
    batch_size: int = 32
    learning_rate: float = 1e-3
    seq_len: int = 64
    """Tokens of an example."""
    evaluations: int = 2
    """On valid, evenly over the steps."""
    eval_batches: int | None = None
    """Batches of valid, and of test where a study says so; all where not given."""
    depths: tuple[int, ...] = ()
    deeper: tuple[int, ...] = ()
    """Depths of some models alone."""
    rates: Any = ()
    """Learning rates to try, or the rate of each model."""
    factors: Sequence[float] = FACTORS
    """Rates to try, in units of a model's usual one."""
    warmup: int = 0
    dropout: float = 0.0
    experts: int = 4
    """Of TransJect."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the task, and what one study alone sets."""
    examples: int = 256
    """Of test, that are looked at closely."""
    pairs: int = 2000
    """Generated, where no data is given."""
    limit: int | None = None
    """Examples or characters of train; all where not given."""


def run_config(
    task: str,
    options: Mapping[str, Any],
    sizes: Sizes,
    *,
    seed: int = 0,
    model: Mapping[str, Any] | None = None,
    **train: Any,
) -> RunConfig:
    """Return the run of ``sizes``: feed-forward layers twice as wide as the model, and what else is
    named."""
    shape = {
        "hidden_size": sizes.width,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "intermediate_size": 2 * sizes.width,
    }
    schedule = {
        "steps": sizes.steps,
        "batch_size": sizes.batch_size,
        "learning_rate": sizes.learning_rate,
        "warmup_steps": sizes.warmup,
        "eval_every": max(1, sizes.steps // sizes.evaluations),
        "eval_batches": sizes.eval_batches,
        "checkpoint_every": sizes.steps,
        "log_every": max(1, sizes.steps // 20),
        "seed": seed,
    }
    return RunConfig(
        task,
        {name: value for name, value in options.items() if value is not None},
        model=ModelOptions(**{**shape, **(model or {})}),
        train=TrainOptions(**{**schedule, **train}),
    )


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
    def rate(self) -> float:
        """The learning rate."""
        return self.config.train.learning_rate

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
        rates = [learning_rate(step, train, width) for step in range(1, train.steps + 1)]
        spent = [0.0, *accumulate(rates)]
        curve = self.curve("valid")
        shares = [spent[step] / spent[-1] for step, _ in curve]
        return levelled_off([loss for _, loss in curve], shares)

    @cached_property
    def model(self) -> Any:
        """The model with the weights that were best on valid, in evaluation mode."""
        from wellposed.training import load_run_model

        return load_run_model(self.folder)[0]

    def losses(self) -> list[tuple[int, str, float]]:
        """Return (step, split, loss) of train and valid wherever a finite loss was logged, in the
        order of training."""
        from wellposed.training import read_metrics

        rows = read_metrics(self.folder)
        logged = [(int(row["step"]), row["split"], float(row["loss"])) for row in rows]
        return [each for each in logged if each[1] != "test" and math.isfinite(each[2])]

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


def folder_name(label: str) -> str:
    """Return a label as a part of a path.

    >>> folder_name("lipschitz:2, T = 30")
    'lipschitz-2-T30'
    """
    return re.sub(r"[ =]", "", label.replace(", ", "-").replace(":", "-"))


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


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope of ln value in ln size by least squares, over the values that are finite.

    >>> round(exponent([1, 2, 4, 8], [3.0, 6.0, 12.0, float("inf")]), 6)
    1.0
    """
    pairs = zip(sizes, values, strict=True)
    points = [(math.log(size), math.log(value)) for size, value in pairs if math.isfinite(value)]
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def minus(left: Sequence[float], right: Sequence[float]) -> list[float]:
    """Return differences, seed by seed."""
    return [a - b for a, b in zip(left, right, strict=True)]


def seed_results(label: str, runs: Iterable[FinishedRun], metric: str) -> SeedResults:
    """Return a metric of every seed, or why it has none."""
    found = [(run, run.metrics.get(metric)) for run in runs]
    return SeedResults(
        label,
        {run.seed: value for run, value in found if value is not None},
        {
            run.seed: Failure("failed", run.failure or f"no {metric}")
            for run, value in found
            if value is None
        },
    )


def mean_series(
    rows: Sequence[Row],
    x: str,
    y: str,
    label: str,
    style: Style = "solid",
    colour: int | None = None,
    *,
    shift: float = 0.0,
) -> Series:
    """Return the means of ``y`` at each ``x`` with their standard errors, none where there is one
    value."""
    at = sorted({row[x] for row in rows})
    found = [mean_and_error([row[y] for row in where(rows, **{x: each})]) for each in at]
    errors = [0.0 if math.isnan(error) else error for _, error in found]
    return Series(
        label, [each + shift for each in at], [mean for mean, _ in found], style, colour, errors
    )


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


def said(values: Sequence[float], digits: int = 2) -> str:
    """Return mean and standard error of values as text, the mean alone where it has no error.

    >>> said([1.0, 1.5]), said([2.0])
    ('1.25 +- 0.25', '2.00')
    """
    mean, error = mean_and_error(values)
    return plus_minus((mean, None if math.isnan(error) else error), digits)


def listing(values: Iterable[object], none: str = "no") -> str:
    """Return values between commas, or ``none``."""
    return ", ".join(map(str, values)) or none
