"""Figures 1 and 3 and Table 1 of McGrath (2024), drawn from a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wellposed.measurement.figures import figure_style, new_figure
from wellposed.recipes._mcgrath2024 import BASELINE, PAPER_TABLE
from wellposed.recipes._mcgrath2024_output import (
    COLUMNS,
    HEADINGS,
    ROW_NAMES,
    CellResult,
    best_of,
    strengths_of,
)
from wellposed.report._plots import COLOURS

PANELS = ("token_embedding", "query", "key", "value", "affinity")
MARKERS = "osD^v"


def figure_1(cells: Sequence[CellResult], path: Path) -> None:
    """Draw every score by strength, a line per penalised place or QR form, over the baseline's mean and error."""
    with figure_style():
        figure = new_figure(11, 3.4)
        for axes, column in zip(figure.subplots(1, len(COLUMNS)), COLUMNS, strict=True):
            base = best_of(cells, BASELINE)
            if base is not None:
                mean, error = base.mean(column)
                axes.axhspan(mean - (error or 0), mean + (error or 0), color="#888888", alpha=0.3, linewidth=0)
                axes.axhline(mean, color="#888888", linewidth=1.2, label=BASELINE)
            for number, (group, results) in enumerate(strengths_of(cells).items()):
                means = [result.mean(column) for result in results]
                # Side by side, so that bars of one strength can be told apart.
                shifted = [result.cell.strength * 1.12 ** (number - 2) for result in results]
                axes.errorbar(
                    shifted,
                    [mean for mean, _ in means],
                    yerr=[error or 0 for _, error in means],
                    color=COLOURS[number % len(COLOURS)],
                    marker=MARKERS[number % len(MARKERS)],
                    markersize=4,
                    linewidth=1.2,
                    capsize=2,
                    label=group,
                )
            if strengths_of(cells):
                axes.set_xscale("log")
            axes.set_xlabel("strength")
            axes.set_title(HEADINGS[column], loc="left")
            axes.grid(visible=True, color="#888888", alpha=0.25, linewidth=0.5)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=6)
        _save(figure, path)


def figure_3(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw err_orth of the baseline over its initial value, a panel per role and a line per layer, mean over seeds."""
    with figure_style():
        figure = new_figure(12, 3.2)
        for axes, role in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
            names = dict.fromkeys(row["weight"] for row in rows if role in row["weight"].split("."))
            for number, name in enumerate(names):
                mine = [row for row in rows if row["weight"] == name and row["error_over_initial"] is not None]
                steps = sorted({row["step"] for row in mine})
                values = [[row["error_over_initial"] for row in mine if row["step"] == step] for step in steps]
                colour = COLOURS[number % len(COLOURS)]
                layer = next((part for part in name.split(".") if part.isdigit()), None)
                axes.plot(
                    steps,
                    [sum(group) / len(group) for group in values],
                    color=colour,
                    linewidth=1.5,
                    label="all" if layer is None else f"layer {layer}",
                )
                low, high = [min(group) for group in values], [max(group) for group in values]
                axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
            axes.axhline(1, color="#888888", linewidth=1, linestyle=(0, (2, 2)))
            axes.set_title(role.replace("_", " "), loc="left")
            axes.set_xlabel("step")
            axes.grid(visible=True, color="#888888", alpha=0.25, linewidth=0.5)
            if names:
                axes.legend(fontsize=7)
        figure.axes[0].set_ylabel("err_orth / initial")
        _save(figure, path)


def table_1_figure(cells: Sequence[CellResult], path: Path) -> None:
    """Draw Table 1: his number (open) and ours with its standard error (filled) for each row and score."""
    with figure_style():
        figure = new_figure(11, 2.6)
        lines = list(PAPER_TABLE)
        for axes, column in zip(figure.subplots(1, len(COLUMNS), sharey=True), COLUMNS, strict=True):
            for number, group in enumerate(lines):
                axes.plot(PAPER_TABLE[group][column], number, "o", markerfacecolor="none", color=COLOURS[0],
                          label="paper says" if number == 0 else None)  # fmt: skip
                best = best_of(cells, group)
                if best is not None:
                    mean, error = best.mean(column)
                    axes.errorbar(mean, number, xerr=error or 0, fmt="s", color=COLOURS[1], capsize=3, markersize=5,
                                  label="we got" if number == 0 else None)  # fmt: skip
            axes.set_title(HEADINGS[column], loc="left")
            axes.set_yticks(range(len(lines)), [ROW_NAMES[group] for group in lines])
            axes.grid(visible=True, color="#888888", alpha=0.25, linewidth=0.5)
        figure.axes[0].invert_yaxis()
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=2)
        _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, facecolor="white", metadata={"Date": None})
