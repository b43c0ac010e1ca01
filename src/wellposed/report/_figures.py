"""The figures of a task: what each panel shows, its caption and its data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wellposed.charts import Panel, Series
from wellposed.measurement.figures import SPECTRUM_POINTS, Spectrum, short_role, spectra_by_role
from wellposed.report._aggregate import TaskComparison
from wellposed.report._certified import CertifiedCurve, certified_caption, certified_curves
from wellposed.report._curves import Curve, task_curves
from wellposed.report._heat import Rows, Weights
from wellposed.report._html_table import CsvLink, csv_link
from wellposed.report._panels import common_limits, panel_svg
from wellposed.report._runs import Run
from wellposed.report._words import metric_words

Numbers = Mapping[str, int]
"""Variant to its number on the page: its colour and its toggle."""


@dataclass(frozen=True)
class Figure:
    """Panels beside each other, the sentence under them and their data."""

    title: str
    panels: Sequence[Any]
    caption: str
    data: CsvLink


def curves_figure(
    name: str, task: TaskComparison, runs: Sequence[Sequence[Run]], numbers: Numbers
) -> Figure | None:
    """Draw metrics over steps; those in nats share their axis."""
    curves = task_curves(task, runs)
    if not curves:
        return None
    panels = [
        _curve_panel(place, drawn, task.reference, numbers) for place, drawn in curves.items()
    ]
    several = any(len(group) > 1 for group in runs)
    band = (
        "Mean over seeds; the band reaches from the lowest seed to the highest."
        if several
        else "One seed."
    )
    rows = [row for drawn in curves.values() for curve in drawn for row in curve.rows()]
    shared = _sharing(panels, lambda panel: "nats" in panel.title)
    return Figure(
        "Training and validation", _drawn(shared, name), band, csv_link(name, list(rows[0]), rows)
    )


def certified_figure(
    name: str, task: TaskComparison, runs: Sequence[Sequence[Run]], numbers: Numbers
) -> Figure | None:
    """Draw accuracy against radius: certified as solid lines, under attack as dashed ones of the
    same colour."""
    curves = certified_curves(task, runs)
    if not curves:
        return None
    series = [line for curve in curves for line in _certified_lines(curve, numbers[curve.variant])]
    panel = Panel(
        "accuracy: certified (solid), attacked (dashed)", "radius (median token norms)", "accuracy", series,
        x_scale="symlog", legend=False, y_limits=(0, 1.02),
    )  # fmt: skip
    rows = [row for curve in curves for row in curve.rows()]
    data = csv_link(name, list(rows[0]), rows)
    return Figure(
        "Certified against attacked accuracy", _drawn([panel], name), certified_caption(runs), data
    )


def spectra_figure(name: str, weights: Weights, numbers: Numbers) -> Figure | None:
    """Draw singular values by role: median over layers, dashed before and solid after, and the
    range after."""
    series: dict[str, list[Series]] = {}
    for variant, before, after in weights:
        for role, spectra in spectra_by_role(before).items():
            line = _spectrum(spectra, f"{variant}, before", numbers[variant])
            series.setdefault(role, []).append(replace(line, style="dashed", band=()))
        for role, spectra in spectra_by_role(after).items():
            series.setdefault(role, []).append(
                _spectrum(spectra, f"{variant}, after", numbers[variant])
            )
    if not series:
        return None
    panels = [
        Panel(short_role(role), "share of singular values", "singular value", lines, legend=False)
        for role, lines in series.items()
    ]
    shared = _sharing(panels, lambda panel: not panel.title.endswith("emb."))
    caption = (
        "Singular values, largest first: median over layers, dashed before and solid after"
        " training; the band holds every layer after training. The CSV has every value of every"
        " layer, with six digits."
    )
    return Figure("Singular values", _drawn(shared, name), caption, _spectra_csv(name, weights))


def _curve_panel(
    place: tuple[str, str],
    curves: Sequence[Curve],
    reference: Mapping[str, float],
    numbers: Numbers,
) -> Panel:
    split, metric = place
    series = [
        Series(
            c.variant,
            c.steps,
            c.mean,
            colour=numbers[c.variant],
            band=(c.low, c.high) if c.seeds > 1 else (),
        )
        for c in curves
    ]
    level = ("reference", reference[metric]) if split != "train" and metric in reference else None
    words = metric_words(f"{metric},{split}")
    return Panel(words, "step", words.partition(" ")[2], series, legend=False, level=level)


def _certified_lines(curve: CertifiedCurve, number: int) -> list[Series]:
    return [
        Series(f"{curve.variant}, certified", curve.shares, curve.certified, colour=number),
        Series(f"{curve.variant}, attacked", curve.shares, curve.attacked, "dashed", colour=number),
    ]


def _spectrum(spectra: Sequence[Spectrum], label: str, number: int) -> Series:
    """Return the median of spectra, and their range, at places that all of them share."""
    import numpy as np

    places = (np.arange(SPECTRUM_POINTS) + 0.5) / SPECTRUM_POINTS
    lines = [
        np.interp(
            places,
            (np.arange(len(values)) + 0.5) / len(values),
            np.sort(np.asarray(values, float))[::-1],
        )
        for values, _ in spectra
    ]
    return Series(
        label,
        places.round(4).tolist(),
        np.median(lines, axis=0).tolist(),
        band=(np.min(lines, axis=0).tolist(), np.max(lines, axis=0).tolist()),
        colour=number,
    )


def _spectra_csv(name: str, weights: Weights) -> CsvLink:
    columns = ["variant", "when", "stack", "layer", "role", "path", "singular_values"]
    rows = [
        {
            **row,
            "singular_values": " ".join(
                f"{value:.6g}" for value in row.get("singular_values") or ()
            ),
        }
        for row in weight_rows(weights)
    ]
    return csv_link(name, columns, rows)


def weight_rows(weights: Weights) -> list[dict[str, Any]]:
    """Return the measurement of every weight with its variant and when it was made."""
    return [
        {"variant": variant, "when": when, **row}
        for variant, before, after in weights
        for when, rows in (("before", before), ("after", after))
        for row in rows
    ]


def mean_rows(measurements: Sequence[Rows]) -> list[dict[str, Any]]:
    """Average the numbers of the same weight over seeds; spectra are averaged value by value,
    largest first."""
    averaged = []
    for twins in zip(*measurements, strict=True):
        row = dict(twins[0])
        for name, value in twins[0].items():
            values = [twin.get(name) for twin in twins]
            if name == "singular_values":
                row[name] = [
                    math.fsum(column) / len(column) for column in zip(*values, strict=True)
                ]
            elif isinstance(value, float):
                row[name] = (
                    None if any(v is None for v in values) else math.fsum(values) / len(values)
                )
        averaged.append(row)
    return averaged


def _sharing(panels: Sequence[Panel], compared: Callable[[Panel], bool]) -> list[Panel]:
    limits = common_limits([panel for panel in panels if compared(panel)])
    return [replace(panel, y_limits=limits) if compared(panel) else panel for panel in panels]


def _drawn(panels: Sequence[Panel], name: str) -> list[Any]:
    return [panel_svg(panel, f"{name}-{number}") for number, panel in enumerate(panels)]
