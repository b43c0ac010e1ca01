"""A model at its best learning rate: every rate is tried with one seed, the best is kept for all."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from wellposed_lab.charts import Row
from wellposed_lab.compare.runs import PlannedRun
from wellposed_lab.training.config import RunConfig
from wellposed_studies.study import FACTORS, FinishedRun

CHOSEN_BY = "accuracy,valid"
Found = TypeVar("Found")
Plan = Callable[[float, int], PlannedRun]
"""The run of a rate and a seed."""
Train = Callable[[list[PlannedRun]], list[FinishedRun]]
Score = Callable[[FinishedRun], float]
Tried = Mapping[float, FinishedRun]
"""The run of every rate that was tried."""


@dataclass(frozen=True)
class Tuned:
    """What one model tried, and its runs at the rate it kept."""

    trials: Sequence[FinishedRun]
    """The first seed at every rate."""
    runs: Sequence[FinishedRun]
    """Every seed at the chosen rate."""

    @property
    def rate(self) -> float:
        """The chosen rate."""
        return self.runs[0].rate

    def each(self, measure: Callable[[FinishedRun], Found]) -> list[Found | None]:
        """Return what is measured of every run, None where training diverged."""
        return [None if run.failure else measure(run) for run in self.runs]

    def rows(
        self,
        fixed: Row,
        measured: Sequence[Found | None],
        described: Callable[[FinishedRun, Found], tuple[Row, Sequence[Row]]],
    ) -> list[Row]:
        """Return the rows of a table: those of each seed, or one with its failure where nothing was
        measured.

        Args:
            fixed: what stands in every row.
            measured: of each run, None where it failed.
            described: what stands in every row of a seed, and its rows.
        """
        rows: list[Row] = []
        for run, found in zip(self.runs, measured, strict=True):
            mine = {**fixed, "rate": self.rate, "seed": run.seed}
            if found is None:
                rows.append({**mine, "error": run.failure})
            else:
                whole, points = described(run, found)
                rows += [{**mine, **whole, **point} for point in points]
        return rows


def rates_about(usual: float, factors: Sequence[float] = FACTORS) -> list[float]:
    """Return the rates to try, to one digit.

    >>> rates_about(0.02)
    [0.007, 0.02, 0.06]
    """
    return [float(f"{usual * factor:.1g}") for factor in factors]


def best_tried(tried: Tried, score: Score) -> float:
    """Return the rate with the best score, of equals the lowest; a score that is not finite is the
    worst.

    >>> best_tried({0.003: 0.8, 0.01: 0.9, 0.03: 0.9, 0.1: math.nan}, lambda score: score)
    0.01
    """
    if len(tried) == 1:
        return next(iter(tried))
    scores = {rate: score(run) for rate, run in sorted(tried.items())}
    return max(scores, key=lambda rate: scores[rate] if math.isfinite(scores[rate]) else -math.inf)


def at_rates(folder: Path, label: str, config: Callable[[float, int], RunConfig]) -> Plan:
    """Return the plan of a model whose folders and labels say rate and seed."""
    return lambda rate, seed: PlannedRun(
        folder.with_name(f"{folder.name}-rate{rate:g}-seed{seed}"),
        f"{label}, rate {rate:g}, seed {seed}",
        config(rate, seed),
    )


def tune(
    train: Train,
    plan: Plan,
    rates: Sequence[float],
    seeds: int,
    *,
    score: Score = lambda run: run.metric(CHOSEN_BY),
    widen: bool = False,
) -> Tuned:
    """Train the first seed of a model at every rate, and the other seeds at the best.

    Args:
        train: trains what is planned.
        plan: the run of a rate and a seed.
        rates: to try.
        seeds: trainings at the best rate.
        score: of a run, the greatest is the best.
        widen: try further rates while the best is the least or the greatest, as many again at most.
    """
    most = 2 * len(rates) if widen else 0
    found = try_rates(train, lambda _, rate: plan(rate, 0), {"": rates}, score=score, most=most)
    tried = found[""]
    rate = best_tried(tried, score)
    others = train([plan(rate, seed) for seed in range(1, seeds)])
    return Tuned(list(tried.values()), [tried[rate], *others])


def try_rates(
    train: Train,
    plan: Callable[[str, float], PlannedRun],
    rates: Mapping[str, Sequence[float]],
    *,
    score: Score,
    most: int = 0,
) -> dict[str, Tried]:
    """Train every model at every one of its rates, then at further ones while its best is the least
    or the greatest.

    Args:
        train: trains what is planned, all models together.
        plan: the run of a model and a rate.
        rates: to try, by model.
        score: of a run, the greatest is the best.
        most: rates that a model tries at most.
    """
    tried: dict[str, dict[float, FinishedRun]] = {model: {} for model in rates}
    wanted = [(model, rate) for model, those in rates.items() for rate in those]
    while wanted:
        for (model, rate), run in zip(wanted, train([plan(*each) for each in wanted]), strict=True):
            tried[model][rate] = run
        wanted = []
        for model, found in tried.items():
            ends = min(found), max(found)
            if len(found) < most and (rate := best_tried(found, score)) in ends:
                further = rates_about(rate, FACTORS[-1:] if rate == max(found) else FACTORS[:1])
                wanted += [(model, rate) for rate in further]
    return dict(tried)
