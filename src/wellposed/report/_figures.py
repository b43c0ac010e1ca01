"""The figures of a task: rows of numbers over seeds, the panels that show them, and captions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from wellposed.charts import Panel, Series, Style, lines, where
from wellposed.measurement.figures import SPECTRUM_POINTS, Spectrum, short_role, spectra_by_role
from wellposed.report._aggregate import SPLITS, TaskComparison, metric_words
from wellposed.report._heat import Rows, Weights
from wellposed.report._html_table import CsvLink, csv_link
from wellposed.report._panels import common_limits, panel_svg
from wellposed.report._runs import Run, is_finite
from wellposed.training.certified.record import CertifiedRun

Numbers = Mapping[str, int]
"""Variant to its number on the page: its colour and its toggle."""
Groups = Mapping[str, Sequence[Run]]
"""The finished runs of each variant that has any, with their files read."""


@dataclass(frozen=True)
class Figure:
    """Panels beside each other, the sentence under them and their data."""

    title: str
    panels: Sequence[Any]
    caption: str
    data: CsvLink


def curves_figure(
    name: str, task: TaskComparison, groups: Groups, numbers: Numbers
) -> Figure | None:
    """Draw training loss, validation loss and the validation headline over steps; those in nats
    share their axis.

    Steps that some seed of a variant has not reached are left out, so a mean is always over all its
    seeds.
    """
    headline = task.metric.partition(",")[0]
    found = {
        (split, metric): [
            row for of, runs in groups.items() for row in _curve_rows(of, split, metric, runs)
        ]
        for split, metric in (
            ("train", "loss"),
            ("valid", "loss"),
            ("valid", headline),
            *(("monitor", name) for name in VITALS),
        )
    }
    if headline != "loss" and _same_means(found["valid", "loss"], found["valid", headline]):
        del found["valid", "loss"]  # nats per character are the loss: one panel is enough
    panels = [
        _curve_panel(*place, rows, task.reference, numbers) for place, rows in found.items() if rows
    ]
    if not panels:
        return None
    several = any(len(runs) > 1 for runs in groups.values())
    band = "Mean over seeds; the band reaches from the lowest seed to the highest."
    every = [row for rows in found.values() for row in rows]
    return Figure(
        "Training and validation",
        _drawn(_sharing(panels, lambda panel: "nats" in panel.title), name),
        band if several else "One seed.",
        csv_link(name, list(every[0]), every),
    )


def certified_figure(name: str, groups: Groups, numbers: Numbers) -> Figure | None:
    """Draw accuracy against radius, as `_certified_curves`."""
    measured = {of: [run.certified for run in runs if run.certified] for of, runs in groups.items()}
    caption = partial(_certified_caption, [run for found in measured.values() for run in found])
    rows = [row for of, found in measured.items() for row in _certified_rows(of, found, "shares")]
    return _certified_curves(name, rows, numbers, "radius (median token norms)", caption)


def words_figure(name: str, groups: Groups, numbers: Numbers) -> Figure | None:
    """Draw accuracy against the number of replaced words, as `_certified_curves`."""
    measured = {of: [run.words for run in runs if run.words] for of, runs in groups.items()}
    rows = [row for of, found in measured.items() for row in _certified_rows(of, found, "counts")]
    caption = (
        "Accuracy when so many words of a text are replaced by any words of the vocabulary: what none"
        " can turn (solid; 0 where there is no certificate) and what a greedy attack left right"
        " (dashed). Mean over seeds."
    )
    return _certified_curves(name, rows, numbers, "replaced words", lambda: caption)


def _certified_curves(
    name: str,
    rows: list[dict[str, Any]],
    numbers: Numbers,
    axis: str,
    caption: Callable[[], str],
) -> Figure | None:
    """Draw certified accuracy as solid lines, under attack as dashed ones of the same colour."""
    if not rows:
        return None
    styles: dict[str, Style] = {"certified": "solid", "attacked": "dashed"}
    series = [
        replace(line, label=f"{line.label}, {what}", colour=numbers[line.label])
        for variant in dict.fromkeys(row["variant"] for row in rows)
        for what, style in styles.items()
        for line in lines(where(rows, variant=variant), "radius", what, by="variant", style=style)
    ]
    panel = Panel(
        "accuracy: certified (solid), attacked (dashed)", axis, "accuracy", series,
        x_scale="linear" if axis.endswith("words") else "symlog", legend=False, y_limits=(0, 1.02),
    )  # fmt: skip
    title, data = "Certified against attacked accuracy", csv_link(name, list(rows[0]), rows)
    return Figure(title, _drawn([panel], name), caption(), data)


def spectra_figure(name: str, weights: Weights, numbers: Numbers) -> Figure | None:
    """Draw singular values by role: median over layers, dashed before and solid after, and the
    range after."""
    series: dict[str, list[Series]] = {}
    for variant, *measured in weights:
        for when, of_model in zip(("before", "after"), measured, strict=True):
            for role, spectra in spectra_by_role(of_model).items():
                line = _spectrum(spectra, f"{variant}, {when}", numbers[variant])
                before = replace(line, style="dashed", band=())
                series.setdefault(role, []).append(before if when == "before" else line)
    if not series:
        return None
    panels = [
        Panel(short_role(role), "share of singular values", "singular value", drawn, legend=False)
        for role, drawn in series.items()
    ]
    shared = _sharing(panels, lambda panel: not panel.title.endswith("emb."))
    caption = (
        "Singular values, largest first: median over layers, dashed before and solid after"
        " training; the band holds every layer after training. The CSV has every value of every"
        " layer, with six digits."
    )
    columns = ["variant", "when", "stack", "layer", "role", "path", "singular_values"]
    rows = weight_rows(weights)
    for row in rows:
        row[columns[-1]] = " ".join(f"{v:.6g}" for v in row.get(columns[-1]) or ())
    return Figure("Singular values", _drawn(shared, name), caption, csv_link(name, columns, rows))


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
                row[name] = [_mean(column) for column in zip(*values, strict=True)]
            elif isinstance(value, float):
                row[name] = None if any(v is None for v in values) else _mean(values)
        averaged.append(row)
    return averaged


def _mean(values: Sequence[Any]) -> float:
    return math.fsum(values) / len(values)


VITALS = ("logit_max", "entropy", "update", "kurtosis")
"""What is drawn of ``train --monitor``: the worst over heads, layers and weights."""


def _shared(columns: Sequence[Mapping[Any, float]]) -> dict[Any, list[float]]:
    """Return the values of all columns where all have one, in order."""
    places = sorted(set.intersection(*(set(column) for column in columns))) if columns else []
    return {place: [column[place] for column in columns] for place in places}


def _curve_rows(
    variant: str, split: str, metric: str, group: Sequence[Run]
) -> list[dict[str, Any]]:
    fixed = {"variant": variant, "split": split, "metric": metric, "seeds": len(group)}
    columns = []
    for run in group:
        logged = [row for row in run.metrics if row["split"] == split]
        known = [row for row in logged if is_finite(row.get(metric))]
        columns.append({int(row["step"]): float(row[metric]) for row in known})
    return [
        {**fixed, "step": step, "mean": _mean(values), "low": min(values), "high": max(values)}
        for step, values in _shared(columns).items()
    ]


def _same_means(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> bool:
    return len(first) == len(second) > 0 and all(
        (a["variant"], a["step"]) == (b["variant"], b["step"])
        and math.isclose(a["mean"], b["mean"], rel_tol=1e-9)
        for a, b in zip(first, second, strict=True)
    )


def _curve_panel(
    split: str, metric: str, rows: Rows, reference: Mapping[str, float], numbers: Numbers
) -> Panel:
    series = []
    for line in lines(rows, "step", "mean", by="variant"):
        mine = where(rows, variant=line.label)
        band = ([row["low"] for row in mine], [row["high"] for row in mine])
        several = mine[0]["seeds"] > 1
        series.append(replace(line, colour=numbers[line.label], band=band if several else ()))
    level = ("reference", reference[metric]) if split != "train" and metric in reference else None
    words = metric_words(f"{metric},{split}")
    return Panel(words, "step", words.partition(" ")[2], series, legend=False, level=level)


def _certified_rows(variant: str, measured: Sequence[Any], axis: str) -> list[dict[str, Any]]:
    certified, attacked = (
        _shared(
            [dict(zip(getattr(run, axis), getattr(run, name), strict=True)) for run in measured]
        )
        for name in ("certified", "attacked")
    )
    fixed = {"variant": variant, "seeds": len(measured)}
    return [
        {**fixed, "radius": at, "certified": _mean(values), "attacked": _mean(attacked[at])}
        for at, values in certified.items()
    ]


def _certified_caption(measured: Sequence[CertifiedRun]) -> str:
    """Return what was measured: the examples, their split, the norm and the attack."""
    splits, norms, attacks = (
        ", ".join(
            SPLITS.get(str(of), str(of))
            for of in dict.fromkeys(getattr(run, name) for run in measured)
        )
        for name in ("split", "norm", "attack")
    )
    low, high = min(run.examples for run in measured), max(run.examples for run in measured)
    examples = f"{low}" if low == high else f"{low} to {high}"
    return (
        f"Accuracy on {examples} {splits} examples when every embedded token moves by up to the"
        f" radius (norm {norms}): what no perturbation can undo (solid) and what the attack left"
        f" right (dashed; {attacks}). Mean over seeds."
    )


def _spectrum(spectra: Sequence[Spectrum], label: str, number: int) -> Series:
    """Return the median of spectra, and their range, at places that all of them share."""
    import numpy as np

    def shares(count: int) -> np.ndarray:
        return (np.arange(count) + 0.5) / count

    places = shares(SPECTRUM_POINTS)
    largest_first = [np.sort(np.asarray(values, float))[::-1] for values, _ in spectra]
    curves = [np.interp(places, shares(len(values)), values) for values in largest_first]
    middle, low, high = (of(curves, axis=0).tolist() for of in (np.median, np.min, np.max))
    return Series(label, places.round(4).tolist(), middle, band=(low, high), colour=number)


def _sharing(panels: Sequence[Panel], compared: Callable[[Panel], bool]) -> list[Panel]:
    limits = common_limits([panel for panel in panels if compared(panel)])
    return [replace(panel, y_limits=limits) if compared(panel) else panel for panel in panels]


def _drawn(panels: Sequence[Panel], name: str) -> list[Any]:
    return [panel_svg(panel, f"{name}-{number}") for number, panel in enumerate(panels)]
