"""Tune the learning rate: try every rate with one seed, train all seeds at the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from wellposed_lab.charts import Row
from wellposed_lab.compare.rates import FACTORS, rates_about
from wellposed_lab.compare.runs import PlannedRun
from wellposed_lab.training.config import RunConfig
from wellposed_studies.study import FinishedRun

CHOSEN_BY = "accuracy,valid"
Found = TypeVar("Found")
Plan = Callable[[float, int], PlannedRun]
"""Function from a rate and a seed to a run."""
Train = Callable[[list[PlannedRun]], list[FinishedRun]]
Score = Callable[[FinishedRun], float]
Tried = Mapping[float, FinishedRun]
"""Runs by tried rate."""


@dataclass(frozen=True)
class Tuned:
    """Trials of one model, and its runs at the best rate."""

    trials: Sequence[FinishedRun]
    """The first seed at every rate."""
    runs: Sequence[FinishedRun]
    """Every seed at the chosen rate."""

    @property
    def rate(self) -> float:
        return self.runs[0].rate

    def for_each_run(self, measure: Callable[[FinishedRun], Found]) -> list[Found | None]:
        return [None if run.failure else measure(run) for run in self.runs]

    def rows(
        self,
        fixed: Row,
        measured: Sequence[Found | None],
        described: Callable[[FinishedRun, Found], tuple[Row, Sequence[Row]]],
    ) -> list[Row]:
        """Return rows of each seed with ``fixed`` columns, or one row if nothing was measured."""
        rows: list[Row] = []
        for run, result in zip(self.runs, measured, strict=True):
            mine = {**fixed, "rate": self.rate, "seed": run.seed}
            if result is None:
                rows.append({**mine, "error": run.failure})
            else:
                common, points = described(run, result)
                rows += [{**mine, **common, **point} for point in points]
        return rows


def best_tried(tried: Tried, score: Score) -> float:
    """Return the rate with the best score, the lowest of equals; non-finite scores are the worst.

    >>> best_tried({0.003: 0.8, 0.01: 0.9, 0.03: 0.9, 0.1: math.nan}, lambda score: score)
    0.01
    """
    if len(tried) == 1:
        return next(iter(tried))
    scores = {rate: score(run) for rate, run in sorted(tried.items())}
    return max(scores, key=lambda rate: scores[rate] if math.isfinite(scores[rate]) else -math.inf)


def at_rates(folder: Path, label: str, config: Callable[[float, int], RunConfig]) -> Plan:
    """Return the plan of a model, with rate and seed in folder names and labels."""
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
    """Train one seed at every rate, the others at the best; ``widen`` tries up to as many again."""
    most = 2 * len(rates) if widen else 0
    trials = try_rates(train, lambda _, rate: plan(rate, 0), {"": rates}, score=score, most=most)
    tried = trials[""]
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
    """Train every model at all its rates, at more while the best is at an end; at most ``most``."""
    tried: dict[str, dict[float, FinishedRun]] = {model: {} for model in rates}
    wanted = [(model, rate) for model, those in rates.items() for rate in those]
    while wanted:
        for (model, rate), run in zip(wanted, train([plan(*pair) for pair in wanted]), strict=True):
            tried[model][rate] = run
        wanted = []
        for model, scores_by_rate in tried.items():
            ends = min(scores_by_rate), max(scores_by_rate)
            if len(scores_by_rate) < most and (rate := best_tried(scores_by_rate, score)) in ends:
                next_rates = rates_about(
                    rate, FACTORS[-1:] if rate == max(scores_by_rate) else FACTORS[:1]
                )
                wanted += [(model, rate) for rate in next_rates]

    return dict(tried)
