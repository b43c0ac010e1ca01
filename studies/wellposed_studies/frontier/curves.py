"""Certified and attacked accuracy over radius, as a panel; free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from wellposed.charts import Panel, Row, Series, Style, where
from wellposed_studies.runs import mean_and_error

STYLES: Mapping[str, Style] = {"certified": "solid", "attacked": "dashed"}


def curves_panel(title: str, rows: Sequence[Row], labels: Iterable[str]) -> Panel:
    """Return the means over seeds with their standard errors; rows have model, radius, certified
    and attacked."""
    series = []
    for colour, label in enumerate(labels):
        mine = where(rows, model=label)
        radii = sorted({float(row["radius"]) for row in mine})
        for column, style in STYLES.items():
            at_radius = [
                [float(row[column]) for row in mine if float(row["radius"]) == radius]
                for radius in radii
            ]
            means, errors = zip(*map(mean_and_error, at_radius), strict=True) if radii else ((), ())
            shown = [0.0 if math.isnan(error) else error for error in errors]
            # A label that starts with "_" has no line in the legend.
            name = label if style == "solid" else f"_{label}"
            series.append(Series(name, radii, means, style, colour, shown))
    return Panel(
        f"{title}: certified, dashed: attacked",
        "radius / token norm",
        "accuracy",
        series,
        x_scale="symlog",
    )
