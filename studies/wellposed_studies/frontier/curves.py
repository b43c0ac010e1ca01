"""Certified and attacked accuracy over radius, as a panel; free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from wellposed.charts import Panel, Row, Style, where
from wellposed_studies.study import mean_series

STYLES: Mapping[str, Style] = {"certified": "solid", "attacked": "dashed"}


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
