"""Certified and attacked accuracy over radius, as numbers and as a panel; free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from wellposed.charts import Panel, Row, Style, where
from wellposed.training.certified.record import CertifiedRun
from wellposed_studies.study import mean_series
from wellposed_studies.tuning import Tuned

STYLES: Mapping[str, Style] = {"certified": "solid", "attacked": "dashed"}


@dataclass(frozen=True)
class Curves:
    """One model on one task: its runs at the rate it kept, and what each is certified for."""

    task: str
    label: str
    tuned: Tuned
    certified: Sequence[CertifiedRun | None]
    """None where training diverged."""

    @classmethod
    def of(cls, name: str, label: str, tuned: Tuned, task: Any, **how: Any) -> Curves:
        """Certify every run; ``how`` goes to `certify_runs`."""
        from wellposed.training.certified.run import certify_runs

        found = tuned.each(lambda run: certify_runs([run.folder], task, **how)[0])
        return cls(name, label, tuned, found)

    def column(self, metric: str) -> list[float]:
        """Return a metric of every seed; nan where training diverged."""
        return [run.metric(metric) for run in self.tuned.runs]

    def at(self, radius: float) -> list[float]:
        """Return certified accuracy at a radius, seed by seed; 0 where training diverged."""
        return [
            dict(zip(run.shares, run.certified, strict=True))[radius] if run else 0.0
            for run in self.certified
        ]

    def half_radius(self) -> float | None:
        """Return the first radius at which at most half of the clean accuracy is certified, in the
        mean over seeds."""
        shares = next((run.shares for run in self.certified if run), [])
        means = {radius: fmean(self.at(radius)) for radius in shares}
        return next((radius for radius in shares if means[radius] <= means[0.0] / 2), None)


def points_of(run: CertifiedRun) -> list[Row]:
    """Return radius, certified and attacked accuracy at each radius."""
    points = zip(run.shares, run.certified, run.attacked, strict=True)
    return [dict(zip(("radius", "certified", "attacked"), point, strict=True)) for point in points]


def curves_panel(title: str, rows: Sequence[Row], labels: Iterable[str]) -> Panel:
    """Return the means over seeds with their standard errors; rows have model, radius, certified
    and attacked."""
    series = []
    for colour, label in enumerate(labels):
        mine = [{**row, "radius": float(row["radius"])} for row in where(rows, model=label)]
        for column, style in STYLES.items():
            known = [{**row, column: float(row[column])} for row in mine]
            # A label that starts with "_" has no line in the legend.
            name = label if style == "solid" else f"_{label}"
            series.append(mean_series(known, "radius", column, name, style, colour))
    heading = f"{title}: certified, dashed: attacked"
    return Panel(heading, "radius / token norm", "accuracy", series, x_scale="symlog")
