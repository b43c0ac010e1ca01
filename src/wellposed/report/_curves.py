"""Metrics over steps, per variant: mean over seeds and the range from the lowest seed to the
highest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from wellposed.report._aggregate import TaskComparison
from wellposed.report._runs import Run


@dataclass(frozen=True)
class Curve:
    """One metric of one variant on one split, at the steps every seed has logged."""

    variant: str
    split: str
    metric: str
    seeds: int
    steps: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    def rows(self) -> list[dict[str, object]]:
        """Return one dictionary per step, for CSV."""
        names = ("step", "mean", "low", "high")
        fixed = {
            "variant": self.variant,
            "split": self.split,
            "metric": self.metric,
            "seeds": self.seeds,
        }
        points = zip(self.steps, self.mean, self.low, self.high, strict=True)
        return [{**fixed, **dict(zip(names, point, strict=True))} for point in points]


def task_curves(
    task: TaskComparison, runs: Sequence[Sequence[Run]]
) -> dict[tuple[str, str], list[Curve]]:
    """Return the curves of each panel (split, metric): training loss, validation loss, validation
    headline metric.

    Steps that some seed of a variant has not reached are left out, so a mean is always over all its
    seeds.
    """
    headline = task.metric.partition(",")[0]
    panels = [
        ("train", "loss"),
        ("valid", "loss"),
        *([("valid", headline)] if headline != "loss" else []),
    ]
    curves: dict[tuple[str, str], list[Curve]] = {}
    for split, metric in panels:
        drawn = [
            _curve(result.variant, split, metric, group)
            for result, group in zip(task.variants, runs, strict=True)
            if group
        ]
        present = [curve for curve in drawn if curve.steps]
        if present:
            curves[split, metric] = present
    if (
        _same_numbers(curves.get(("valid", "loss")), curves.get(("valid", headline)))
        and headline != "loss"
    ):
        del curves["valid", "loss"]  # nats per character are the loss: one panel is enough
    return curves


def _same_numbers(first: Sequence[Curve] | None, second: Sequence[Curve] | None) -> bool:
    if first is None or second is None:
        return False
    pairs = zip(first, second, strict=True) if len(first) == len(second) else []
    same = [
        a.steps == b.steps
        and all(math.isclose(x, y, rel_tol=1e-9) for x, y in zip(a.mean, b.mean, strict=True))
        for a, b in pairs
    ]
    return bool(same) and all(same)


def _curve(variant: str, split: str, metric: str, group: Sequence[Run]) -> Curve:
    series = [_series(run, split, metric) for run in group]
    steps = tuple(sorted(set.intersection(*(set(values) for values in series))))
    columns = [[values[step] for values in series] for step in steps]
    return Curve(
        variant=variant,
        split=split,
        metric=metric,
        seeds=len(group),
        steps=steps,
        mean=tuple(math.fsum(column) / len(column) for column in columns),
        low=tuple(min(column) for column in columns),
        high=tuple(max(column) for column in columns),
    )


def _series(run: Run, split: str, metric: str) -> dict[int, float]:
    rows = (row for row in run.metrics if row["split"] == split)
    return {
        int(row["step"]): float(row[metric])
        for row in rows
        if isinstance(row.get(metric), (int, float)) and math.isfinite(row[metric])
    }
