"""Figures 1 and 3 and Table 1 of McGrath (2024) as panels, from the cells of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wellposed.charts import Panel, Series
from wellposed.recipes.mcgrath2024 import BASELINE, PAPER_TABLE
from wellposed.recipes.mcgrath2024.output import COLUMNS, HEADINGS, ROW_NAMES, CellResult, best_of, strengths_of
from wellposed.report import mean_and_standard_error

ROLES = ("token_embedding", "query", "key", "value", "affinity")
_GREY = 6


def figure_1(cells: Sequence[CellResult]) -> list[Panel]:
    """Return a panel a score: mean and standard error by strength, a line a place or QR form, and the baseline."""
    panels = []
    for column in COLUMNS:
        series = []
        for number, (group, results) in enumerate(strengths_of(cells).items()):
            means, errors = zip(*(result.mean(column) for result in results), strict=True)
            # Side by side, so that bars of one strength can be told apart.
            shifted = [result.cell.strength * 1.12 ** (number - 2) for result in results]
            series.append(Series(group, shifted, means, errors=[error or 0.0 for error in errors]))
        base = best_of(cells, BASELINE)
        strengths = [x for line in series for x in line.x]
        if base is not None and strengths:
            level = [base.mean(column)[0]] * 2
            series.append(Series(BASELINE, [min(strengths), max(strengths)], level, "dashed", colour=_GREY))
        panels.append(Panel(HEADINGS[column], "strength", "score", series, "log", legend=column == COLUMNS[0]))
    return panels


def figure_3(rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Return a panel a role: err_orth of the baseline over its initial value, a line a layer, mean over the seeds."""
    return [Panel(role.replace("_", " "), "step", "err_orth / initial", _drift(rows, role)) for role in ROLES]


def _drift(rows: Sequence[Mapping[str, Any]], role: str) -> list[Series]:
    series = []
    for name in dict.fromkeys(row["weight"] for row in rows if role in row["weight"].split(".")):
        mine = [row for row in rows if row["weight"] == name and row["error_over_initial"] is not None]
        steps = sorted({row["step"] for row in mine})
        ratios = [[row["error_over_initial"] for row in mine if row["step"] == step] for step in steps]
        means, errors = zip(*map(mean_and_standard_error, ratios), strict=True) if ratios else ((), ())
        layer = next((part for part in name.split(".") if part.isdigit()), None)
        label = "all" if layer is None else f"layer {layer}"
        series.append(Series(label, steps, means, errors=[error or 0.0 for error in errors]))
    return series


def table_1(cells: Sequence[CellResult]) -> list[Panel]:
    """Return a panel a score: his number beside ours with its standard error, for each of his four rows."""
    groups = list(PAPER_TABLE)
    best = [(number, result) for number, group in enumerate(groups) if (result := best_of(cells, group))]
    panels = []
    for column in COLUMNS:
        found = [result.mean(column) for _, result in best]
        series = [
            Series("paper says", range(len(groups)), [PAPER_TABLE[group][column] for group in groups], "dots"),
            Series(
                "we got",
                [number for number, _ in best],
                [mean for mean, _ in found],
                "dots",
                errors=[error or 0.0 for _, error in found],
            ),
        ]
        names = [ROW_NAMES[group] for group in groups]
        panels.append(Panel(HEADINGS[column], "penalty", "score", series, legend=column == COLUMNS[0], names=names))
    return panels
