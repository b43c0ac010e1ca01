"""Figures 1 and 3 and Table 1 of McGrath (2024) as panels, from the cells of a sweep."""

from __future__ import annotations

from collections.abc import Sequence

from wellposed.charts import Panel, Row, Series, where
from wellposed.roles.layer_paths import layer_index, split_path
from wellposed.statistics import mean_and_standard_error
from wellposed_studies.mcgrath2024.grid import BASELINE, PAPER_TABLE
from wellposed_studies.mcgrath2024.results import (
    COLUMNS,
    ROW_NAMES,
    CellResult,
    best_of,
    by_strength,
)

HEADINGS = {
    "sst": "SST accuracy",
    "para": "Para accuracy",
    "sts": "STS Pearson",
    "overall": "overall",
}
ROLES = ("token_embedding", "query", "key", "value", "affinity")
_GREY = 6


def figure_1(cells: Sequence[CellResult]) -> list[Panel]:
    """Return a panel a score: mean and standard error by strength, a line a place or QR form, and
    the baseline."""
    panels = []
    base = best_of(cells, BASELINE)
    for column in COLUMNS:
        series = []
        for number, (group, results) in enumerate(by_strength(cells).items()):
            # Side by side, so that bars of one strength can be told apart.
            shifted = [result.cell.strength * 1.12 ** (number - 2) for result in results]
            series.append(_with_errors(group, shifted, [result.mean(column) for result in results]))
        strengths = [x for line in series for x in line.x]
        if base is not None and strengths:
            level = [base.mean(column)[0]] * 2
            series.append(
                Series(BASELINE, [min(strengths), max(strengths)], level, "dashed", colour=_GREY)
            )
        panels.append(
            Panel(
                HEADINGS[column],
                "strength",
                HEADINGS[column],
                series,
                "log",
                legend=column == COLUMNS[0],
            )
        )
    return panels


def figure_3(rows: Sequence[Row]) -> list[Panel]:
    """Return a panel a role: err_orth of the baseline over its initial value, a line a layer, mean
    over the seeds."""
    return [
        Panel(role.replace("_", " "), "step", "err_orth / initial", _drift(rows, role))
        for role in ROLES
    ]


def _drift(rows: Sequence[Row], role: str) -> list[Series]:
    series = []
    for name in dict.fromkeys(row["weight"] for row in rows if role in row["weight"].split(".")):
        mine = [row for row in where(rows, weight=name) if row["error_over_initial"] is not None]
        steps = sorted({row["step"] for row in mine})
        ratios = [[row["error_over_initial"] for row in where(mine, step=step)] for step in steps]
        label = f"layer {layer_index(name)}" if split_path(name)[1] else "all"
        series.append(_with_errors(label, steps, list(map(mean_and_standard_error, ratios))))
    return series


def table_1(cells: Sequence[CellResult]) -> list[Panel]:
    """Return a panel a score: his number beside ours with its standard error, for each of his four
    rows."""
    best = {
        place: found
        for place, group in enumerate(PAPER_TABLE)
        if (found := best_of(cells, group)) is not None
    }
    names = [ROW_NAMES[group] for group in PAPER_TABLE]
    panels = []
    for column in COLUMNS:
        paper = [row[column] for row in PAPER_TABLE.values()]
        ours = [result.mean(column) for result in best.values()]
        series = [
            Series("paper says", range(len(paper)), paper, "dots"),
            _with_errors("we got", list(best), ours, dots=True),
        ]
        panels.append(
            Panel(
                HEADINGS[column],
                "penalty",
                HEADINGS[column],
                series,
                legend=column == COLUMNS[0],
                names=names,
            )
        )
    return panels


def _with_errors(
    label: str,
    x: Sequence[float],
    means: Sequence[tuple[float, float | None]],
    *,
    dots: bool = False,
) -> Series:
    """Return means with their standard errors as bars."""
    style = "dots" if dots else "solid"
    return Series(
        label, x, [mean for mean, _ in means], style, errors=[error or 0.0 for _, error in means]
    )
