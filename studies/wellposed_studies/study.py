"""Shared parts of the studies: sizes, cached training runs, means with errors, timings."""

from __future__ import annotations

import itertools
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from wellposed.model_options import ModelOptions
from wellposed_lab.charts import Panel, Row, Series, Style, medians, where
from wellposed_lab.compare.runs import PlannedRun, train_planned
from wellposed_lab.statistics import Failure, SeedResults, mean_and_standard_error
from wellposed_lab.training.config import RunConfig, TrainOptions
from wellposed_studies.recipe import SIZES, Criterion, Reproduction, Request, Verdict
from wellposed_studies.run_sizes import size_of
from wellposed_studies.verdicts import (
    AGREED,
    LEARNED,
    OVERFITS,
    STILL_LEARNING,
    UNCERTAINTY,
    unsettled,
)

if TYPE_CHECKING:
    from wellposed_lab.tasks.task import Task
    from wellposed_lab.training.folder.result import RunResult

FACTORS = (1 / 3, 1.0, 3.0)
"""Learning rates to try, in units of a model's usual one."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a study at one scale; a study reads the fields that it sets."""

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
    """Evaluations on valid, evenly over the steps."""
    eval_batches: int | None = None
    """Batches of valid, in some studies also of test; None reads all."""
    depths: tuple[int, ...] = ()
    rates: Any = ()
    """Learning rates to try, or the rate of each model."""
    factors: Sequence[float] = FACTORS
    """Rates to try, in units of a model's usual one."""
    warmup: int = 0
    dropout: float = 0.0
    experts: int = 4
    """Experts of TransJect."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the task and of single studies."""
    examples: int = 256
    """Test examples for certificates and attacks."""
    pairs: int = 2000
    """Generated pairs if no data is given."""
    limit: int | None = None
    """Examples or characters of train; None reads all."""


def sizes_at(request: Request, study: str) -> Sizes:
    return Sizes(**SIZES[study][request.scale])


def run_config(
    task: str,
    options: Mapping[str, Any],
    sizes: Sizes,
    *,
    seed: int = 0,
    model: Mapping[str, Any] | None = None,
    **train: Any,
) -> RunConfig:
    """Return a run of these sizes with an MLP of twice the width; ``model`` and keywords override."""
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
    """A finished training and the results in its folder."""

    config: RunConfig
    folder: Path
    metrics: Mapping[str, float] = field(default_factory=dict)
    """``accuracy,test`` and so on, of the best weights; empty if training diverged."""
    reference: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the best constant predictor; the first metric is the compared one."""
    higher_is_better: Mapping[str, bool] = field(default_factory=dict)
    """Direction of each metric."""
    samples: Mapping[str, int] = field(default_factory=dict)
    """Number of examples read from valid and test."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """``train_info`` of result.json: steps, seconds, parameters, why it failed."""

    @classmethod
    def from_result(cls, result: RunResult) -> FinishedRun:
        """Return the run of a result; raise KeyboardInterrupt if the user stopped it."""
        if result.status == "cancelled":
            raise KeyboardInterrupt
        values = result.result
        config = RunConfig.from_dict(values["config"], where=f"{result.out}/result.json")
        metrics = values["results"][config.task] if result.status == "success" else {}
        constant = values["reference"]
        falls = values["higher_is_better"]
        samples = values["n-samples"][config.task]
        info = values["train_info"]
        return cls(config, result.out, metrics, constant, falls, samples, info)

    @property
    def variant(self) -> str:
        """Name of the variant, with its value if it has one."""
        return self.config.variant

    @property
    def seed(self) -> int:
        """Seed of weights, batches and dropout."""
        return self.config.train.seed

    @property
    def depth(self) -> int:
        return self.config.model.num_hidden_layers

    @property
    def rate(self) -> float:
        return self.config.train.learning_rate

    @property
    def failure(self) -> str:
        """Reason why training failed; empty if it did not."""
        return "" if self.metrics else str(self.info.get("reason", ""))

    def metric(self, name: str, missing: float = math.nan) -> float:
        """Return a metric, or ``missing`` if training diverged."""
        return float(self.metrics[name]) if self.metrics else missing

    @property
    def settled(self) -> bool:
        """Whether the losses on *valid* and train had levelled off, or training failed for good."""
        return not self.unsettled

    @property
    def unsettled(self) -> str:
        """Why the training cannot be judged, see `verdicts.unsettled`; empty if it can."""
        from wellposed_lab.training.loop.schedules import learning_rate

        if self.failure:
            return ""
        train = self.config.train
        width = self.config.model.hidden_size
        rates = [learning_rate(step, train, width) for step in range(1, train.steps + 1)]
        spent = [0.0, *accumulate(rates)]
        logged = self.logged()
        valid = [row for row in logged if row["split"] == "valid"]
        ended = valid[-1]["step"] if valid else 0  # earlier than planned if patience ran out
        shares = [spent[row["step"]] / spent[ended] for row in valid]
        errors = [1 - row["accuracy"] for row in valid if "accuracy" in row]
        trained = [
            (spent[row["step"]] / spent[ended], row["loss"])
            for row in logged
            if row["split"] == "train" and row["step"] <= ended
        ]
        return unsettled([row["loss"] for row in valid], shares, errors, trained)

    @cached_property
    def needs_blocks(self) -> bool:
        """Whether the training loss rises if its blocks return their inputs, see `blocks`."""
        from wellposed_studies.blocks import needs_blocks

        return needs_blocks(self.config, self.folder)

    @cached_property
    def model(self) -> Any:
        """Model with the weights that were best on valid, in evaluation mode."""
        from wellposed_lab.training.loop.build import load_run_model

        return load_run_model(self.folder)[0]

    @cached_property
    def untrained(self) -> Any:
        """Model at the start of training, drawn again, in evaluation mode."""
        from accelerate.utils import set_seed

        from wellposed_lab.tasks.task import build_task
        from wellposed_lab.training.loop.build import build_run_model

        task = build_task(self.config.task, self.config.task_options)
        set_seed(self.seed)
        return build_run_model(self.config, task).eval()

    def logged(self) -> list[dict[str, Any]]:
        """Return the logged rows of train and valid with a finite loss, in order."""
        from wellposed_lab.report.runs import read_metrics

        is_logged = (self.folder / "metrics.jsonl").is_file()
        rows = read_metrics(self.folder) if is_logged else ()
        return [dict(row) for row in rows if row["split"] != "test" and math.isfinite(row["loss"])]

    def curve(self, split: str) -> list[tuple[int, float]]:
        return [(int(row["step"]), row["loss"]) for row in self.logged() if row["split"] == split]


def learned(runs: Sequence[FinishedRun]) -> bool:
    """Return whether a model beats the best constant by `LEARNED` standard errors.

    The error combines seeds and examples; if a seed failed, the model has not learned.
    """
    if any(run.failure for run in runs):
        return False
    name, constant = next(iter(runs[0].reference.items()))
    counts = runs[0].samples
    split = "valid" if counts["test"] < counts["valid"] else "test"
    mean, error = mean_and_error([run.metric(f"{name},{split}") for run in runs])
    if not runs[0].higher_is_better[name]:
        return constant - mean > LEARNED * error
    drawn = mean * (1 - mean) / counts[split] + constant * (1 - constant) / counts["valid"]
    of_seeds = 0.0 if len(runs) == 1 else error
    return mean - constant > LEARNED * math.hypot(of_seeds, math.sqrt(drawn))


def unfit(
    runs: Iterable[FinishedRun],
    *,
    level: bool = True,
    fails: Callable[[FinishedRun], bool] = lambda _: False,
    passed: Callable[[FinishedRun], bool] = lambda _: False,
) -> list[str]:
    """Return why models cannot be judged: they did not learn, were still learning at the end, overfit,
    or trained as well without their blocks.

    ``fails`` excuses runs that the claim expects not to learn. If ``level`` is False, no loss must
    level off, because training ends as the paper's does. Nor must that of a run that has ``passed``
    a threshold, if nothing else is judged. Controls of no layers need no blocks.
    """
    models: dict[str, list[FinishedRun]] = {}
    for run in runs:
        of_all_seeds = replace(run.config, train=replace(run.config.train, seed=0))
        models.setdefault(repr(of_all_seeds), []).append(run)

    reasons = []
    for mine in models.values():
        start = Path(mine[0].config.start.model).name
        size = f"from {start}" if start else f"of {mine[0].depth} layers"
        name = f"{mine[0].variant} {size} on {mine[0].config.task}"
        excused = fails(mine[0])
        if not (excused or learned(mine)):
            reasons.append(f"{name} is not {LEARNED} standard errors better than a constant")
        elif level and not all(passed(run) or run.settled for run in mine):
            overfits = any(run.unsettled == OVERFITS for run in mine)
            reasons.append(f"{name} {OVERFITS if overfits else STILL_LEARNING}")
        elif not excused and mine[0].depth and not all(run.needs_blocks for run in mine):
            reasons.append(f"{name} fits as well if its blocks return their inputs")

    return list(dict.fromkeys(reasons))


def judged(
    request: Request,
    rows: Sequence[Row],
    panels: Sequence[Panel],
    got: str,
    holds: Verdict,
    runs: Sequence[FinishedRun],
    *,
    seeds: int | None = None,
    uncertainty: str = UNCERTAINTY,
    notes: Sequence[str] = (),
    level: bool = True,
    **excuses: Callable[[FinishedRun], bool],
) -> Reproduction:
    """Return the result of trained models; undecided if one of them cannot be judged (`unfit`).

    All ``runs`` are behind the verdict, ``seeds`` (default: theirs) behind each number. The test is
    in the recipe's docstring. See `unfit` for ``level``, ``fails`` and ``passed``.
    """
    reasons = unfit(runs, level=level and request.scale != "paper", **excuses)
    if reasons:
        holds = None
        notes = [*notes, f"not judged: {'; '.join(reasons)}"]
    criterion = Criterion("", seeds or len({run.seed for run in runs}), uncertainty)
    size = size_of([run.config for run in runs])
    return Reproduction(rows, panels, got, holds, tuple(notes), criterion, size)


def proved(
    rows: Sequence[Row],
    got: str,
    holds: Verdict,
    *panels: Panel,
    seeds: int = 0,
    sure: str = AGREED,
    notes: tuple[str, ...] = (),
    size: Mapping[str, Any] | None = None,
) -> Reproduction:
    """Return the result of formulas and random weights, if nothing is trained.

    ``size`` is for timings of trainings below the paper's size.
    """
    return Reproduction(rows, panels, got, holds, notes, Criterion("", seeds, sure), size)


def train_grid(
    request: Request,
    planned: Iterable[PlannedRun],
    *,
    task: Task | None = None,
    test_batches: int | None = None,
) -> list[FinishedRun]:
    """Train every planned run, or load it if it is finished."""
    options = {"announce": request.announce, "jobs": request.jobs or 1}
    results = train_planned(planned, task=task, test_batches=test_batches, **options)
    return [FinishedRun.from_result(result) for result in results]


def depths_trained(runs: Sequence[FinishedRun], trains: Callable[[FinishedRun], bool]) -> list[int]:
    """Return the depths at which every run trains."""
    failed = {run.depth for run in runs if not trains(run)}
    return [depth for depth in dict.fromkeys(run.depth for run in runs) if depth not in failed]


def folder_name(label: str) -> str:
    """Return a label as a part of a path: ``lipschitz-2-T30`` of ``lipschitz:2, T = 30``."""
    return re.sub(r"[ =]", "", label.replace(", ", "-").replace(":", "-"))


def curves(
    runs: Iterable[FinishedRun], split: str, label: Callable[[FinishedRun], str]
) -> list[Series]:
    losses = {label(run): dict(run.curve(split)) for run in runs}
    return [Series(name, list(curve), list(curve.values())) for name, curve in losses.items()]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard error; the error is nan for one value or any non-finite value.

    >>> mean_and_error([1.0, 3.0]), mean_and_error([-math.inf, 1.0])
    ((2.0, 1.0), (-inf, nan))
    """
    if not all(map(math.isfinite, values)):
        return statistics.fmean(values), math.nan
    mean, error = mean_and_standard_error(values)
    return mean, math.nan if error is None else error


def means(rows: Sequence[Row], x: str, y: str) -> dict[float, float]:
    """Return the mean of ``y`` at each ``x``, in order."""
    at = sorted({row[x] for row in rows})
    return {value: mean_and_error([row[y] for row in rows if row[x] == value])[0] for value in at}


def mean_series(
    rows: Sequence[Row],
    x: str,
    y: str,
    label: str,
    style: Style = "solid",
    colour: int | None = None,
    *,
    shift: float = 0.0,
    bars: bool = True,
) -> Series:
    """Return the means of ``y`` at each ``x``; with ``bars``, also their standard errors."""
    centre = means(rows, x, y)
    errors = [mean_and_error([row[y] for row in where(rows, **{x: at_x})])[1] for at_x in centre]
    error_bars = [0.0 if math.isnan(error) else error for error in errors] if bars else ()
    at = [at_x + shift for at_x in centre]
    return Series(label, at, list(centre.values()), style, colour, error_bars)


def log_panel(title: str, rows: Sequence[Row], x: str, y: str, *, by: str) -> Panel:
    """Return a panel of the medians of ``y`` over ``x``, both on logarithmic axes."""
    series = medians(rows, x, y, by=by)
    return Panel(title, x.replace("_", " "), y.replace("_", " "), series, "log", "log")


def exponent(rows: Sequence[Row], x: str, y: str) -> float:
    """Return the least-squares slope of ln ``y`` in ln ``x`` over the finite values.

    >>> rows = [{"N": n, "error": 3.0 * n} for n in (1, 2, 4, 8, math.inf)]
    >>> round(exponent(rows, "N", "error"), 6)
    1.0
    """
    points = [(math.log(row[x]), math.log(row[y])) for row in rows if math.isfinite(row[y])]
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def minus(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(left, right, strict=True)]


def seed_results(label: str, runs: Iterable[FinishedRun], metric: str) -> SeedResults:
    """Return a metric of every seed, or the reason why it is missing."""
    values = {}
    failures = {}
    for run in runs:
        value = run.metrics.get(metric)
        if value is None:
            failures[run.seed] = Failure("failed", run.failure or f"no {metric}")
        else:
            values[run.seed] = value
    return SeedResults(label, values, failures)


def spanned(values: Sequence[float]) -> str:
    """Return the smallest and largest value, as ``1 to 120``; one number if they agree."""
    return " to ".join(dict.fromkeys(f"{value:.3g}" for value in (min(values), max(values))))


def mean_se(values: Sequence[float], digits: int = 2) -> str:
    """Return mean and standard error as text, as ``1.25 +- 0.25``; the mean alone without error."""
    mean, error = mean_and_error(values)
    return f"{mean:.{digits}f}" + ("" if math.isnan(error) else f" +- {error:.{digits}f}")


def listing(values: Iterable[object], none: str = "no") -> str:
    """Return values joined by commas, or ``none``."""
    return ", ".join(map(str, values)) or none


def timing_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def median_seconds(
    calls: Mapping[str, Callable[[], Any]], repeats: int, *, warmup: int
) -> dict[str, float]:
    """Return the median time of each call over interleaved rounds, after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(warmup + repeats):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values[warmup:]) for name, values in times.items()}


def sweep(measure: Callable[..., Row], **axes: Iterable[Any]) -> list[Row]:
    """Return ``measure`` at every point of a grid, one row each; ``seed`` only seeds torch.

    >>> sweep(lambda n: {"twice": 2 * n}, n=[1, 2], seed=[0])
    [{'n': 1, 'seed': 0, 'twice': 2}, {'n': 2, 'seed': 0, 'twice': 4}]
    """
    rows = []
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        torch.manual_seed(point.get("seed", 0))
        arguments = {name: value for name, value in point.items() if name != "seed"}
        rows.append({**point, **measure(**arguments)})
    return rows
