"""The figures of a task: rows of numbers over seeds, the panels that show them, and captions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from wellposed.charts import Panel, Series, lines, where
from wellposed.measurement import figures as measured
from wellposed.measurement.figures import SPECTRUM_POINTS, short_number, short_role
from wellposed.report._aggregate import SPLITS, TaskComparison, metric_words
from wellposed.report._charts import chart, fitted, level_bounds, level_style, role_map
from wellposed.report._html_table import Column, CsvLink, Table, csv_link
from wellposed.report._runs import Run, is_finite

Numbers = Mapping[str, int]
"""Variant to its number on the page: its colour and its toggle."""
Groups = Mapping[str, Sequence[Run]]
"""The finished runs of each variant that has any, with their files read."""
Rows = Sequence[Mapping[str, Any]]
Weights = Sequence[tuple[str, Rows, Rows]]
VITALS = ("logit_max", "entropy", "update", "kurtosis")
"""What is drawn of ``train --monitor``: the worst over heads, layers and weights."""
Panels = Mapping[str, Sequence[Panel]]
Said = tuple[str, CsvLink]
Figure = dict[str, Any]
"""What the template draws: charts in rows, the sentence under them and their data; and the panels of the
charts."""
MOST_LINES = 32
"""Spectra of a chart."""
CURVES = {"curves": ("Training and validation", "wide"), "vitals": ("Vital signs", "beside")}
LOOK = ("Certified against attacked accuracy", "beside")
LEFT = {
    "certified": "certified: right whatever the change",
    "attacked": "attacked: right after the attack",
}
CERTIFIED: Mapping[str, Any] = {
    "certified": ("shares", "radius (median token norms)", "symlog"),
    "words": ("counts", "replaced words", "linear"),
}


def _figure(look: tuple[str, str], rows: Panels, said: Said, numbers: Numbers) -> Figure:
    """Return the figure of panels, by the variant that they are of where they are of one; ``look`` is
    its title and ``wide``, each chart over the whole page, ``beside``, two in a row, or ``small``."""
    title, kind = look
    panels = [panel for of in rows.values() for panel in of]
    fits = iter(fitted(panels))
    named = [
        (of, numbers.get(of), [chart(*next(fits), quiet=kind == "small") for _ in drawn])
        for of, drawn in rows.items()
    ]
    shown = {"title": title, "kind": kind, "rows": named, "panels": panels}
    return {**shown, "caption": said[0], "data": said[1]}


def curve_figures(
    name: str, task: TaskComparison, groups: Groups, numbers: Numbers
) -> list[Figure]:
    """Draw training loss, validation loss and the validation headline over steps, then vital signs.

    Steps that some seed of a variant has not reached are left out, so a mean is always over all its
    seeds.
    """
    headline = task.metric.partition(",")[0]
    places = [("train", "loss"), ("valid", "loss"), ("valid", headline)]
    parts = {"curves": places, "vitals": [("monitor", vital) for vital in VITALS]}
    caption = "One seed."
    if any(len(runs) > 1 for runs in groups.values()):
        caption = "Mean over seeds; the band reaches from the lowest seed to the highest."
    figures = []
    for part, wanted in parts.items():
        drawn = {
            place: [row for of, runs in groups.items() for row in _curve_rows(of, *place, runs)]
            for place in dict.fromkeys(wanted)
        }
        if headline != "loss" and _same_means(*(drawn.get(place, ()) for place in places[1:])):
            del drawn[places[1]]  # nats per character are the loss: one panel is enough
        shown = [(place, rows) for place, rows in drawn.items() if rows]
        panels = [_curve_panel(*place, rows, task.reference, numbers) for place, rows in shown]
        every = [row for rows in drawn.values() for row in rows]
        if every:
            said = caption, csv_link(f"{name}-{part}", list(every[0]), every)
            figures.append(_figure(CURVES[part], {"": panels}, said, {}))
    return figures


def _same_means(first: Rows, second: Rows) -> bool:
    return len(first) == len(second) > 0 and all(
        (a["variant"], a["step"]) == (b["variant"], b["step"])
        and math.isclose(a["mean"], b["mean"], rel_tol=1e-9)
        for a, b in zip(first, second, strict=True)
    )


def certified_figures(name: str, groups: Groups, numbers: Numbers) -> list[Figure]:
    """Draw what no change can undo and what an attack left right, over the radius and over the
    number of replaced words."""
    figures = []
    for part, (places, axis, scale) in CERTIFIED.items():
        read = {of: [getattr(run, part) for run in runs] for of, runs in groups.items()}
        known = {of: list(filter(None, found)) for of, found in read.items()}
        rows = [row for of, found in known.items() for row in _certified_rows(of, found, places)]
        every = [run for found in known.values() for run in found]
        panels = []
        for what, title in LEFT.items():
            series = _lines(rows, "radius", what, numbers)
            panels.append(Panel(title, axis, "accuracy", series, scale, y_limits=(0, 1.02)))
        if rows:
            said = _certified_caption(every, part), csv_link(f"{name}-{part}", list(rows[0]), rows)
            figures.append(_figure(LOOK, {"": panels}, said, {}))
    return figures


def _certified_caption(measured: Sequence[Any], part: str) -> str:
    """Return what was measured: the examples, their split, the norm and the attack."""
    if part == "words":
        return (
            "Accuracy when so many words of a text are replaced by any words of the vocabulary: what"
            " none can turn (0 where there is no certificate) and what a greedy attack left right. Mean"
            " over seeds."
        )
    examples, splits, norms, attacks = (
        ", ".join(dict.fromkeys(SPLITS.get(each, each) for each in map(str, values)))
        for values in zip(*((r.examples, r.split, r.norm, r.attack) for r in measured), strict=True)
    )
    return (
        f"Accuracy on {examples} {splits} examples when every embedded token moves by up to the"
        f" radius (norm {norms}): what no perturbation can undo and what the attack left right"
        f" ({attacks}). Mean over seeds."
    )


def spectra_figure(name: str, weights: Weights, numbers: Numbers) -> Figure | None:
    """Draw singular values of every layer after training, a row of charts for each variant and a
    chart for each role, on one axis; dashed the median before."""
    import numpy as np

    places = (np.arange(SPECTRUM_POINTS) + 0.5) / SPECTRUM_POINTS

    def curve(values: Sequence[float]) -> list[float]:
        largest_first = np.sort(np.asarray(values, float))[::-1]
        shares = (np.arange(len(values)) + 0.5) / len(values)
        return np.interp(places, shares, largest_first).tolist()

    drawn: dict[str, list[Panel]] = {}
    for variant, *pair in weights:
        before, after = map(measured.spectra_by_role, pair)
        line = partial(Series, variant, places.tolist(), colour=numbers[variant])
        for role, spectra in after.items():
            some = [curve(values) for values, _ in spectra[:: -(-len(spectra) // MOST_LINES)]]
            starts = [curve(values) for values, _ in before.get(role, ())]
            lines = [line(each) for each in some]
            lines += [line(np.median(starts, 0).tolist(), "dashed")] if starts else []
            # Embeddings are of another size than the weights of layers.
            axis = "of embeddings" if role.endswith("_embedding") else "of layers"
            panel = Panel(short_role(role), "", axis, lines, legend=False)
            drawn.setdefault(variant, []).append(panel)
    columns = ["variant", "when", "stack", "layer", "role", "path", "singular_values"]
    rows = weight_rows(weights)
    for row in rows:
        row[columns[-1]] = " ".join(f"{v:.6g}" for v in row.get(columns[-1]) or ())
    caption = (
        "Singular values, largest first, against their share: a line for each layer after training, the"
        f" first pale and the last full (of more than {MOST_LINES}, some); dashed the median over layers"
        " before. The CSV has every value of every layer, with six digits."
    )
    said = caption, csv_link(name, columns, rows)
    return _figure(("Singular values", "small"), drawn, said, numbers) if drawn else None


def orthogonality_maps(name: str, weights: Weights, numbers: Numbers) -> Figure | None:
    """Return the maps of all variants on one scale; None where no weight belongs to a layer."""
    error = measured.error_shown(row for _, *pair in weights for rows in pair for row in rows)
    found = [
        (variant, when, measured.heat_map(rows, error.name))
        for variant, *pair in weights
        for when, rows in zip(("before", "after"), pair, strict=True)
    ]
    values = [value for *_, heat in found for line in heat.values for value in line]
    bounds = level_bounds(value for value in values if value and 0 < value < math.inf)
    if not bounds:
        return None
    maps: dict[str, list[Any]] = {}
    largest = []
    for variant, when, heat in found:
        columns = zip(heat.roles, zip(*heat.values, strict=True), strict=True)
        worst = {role: max(v for v in column if v is not None) for role, column in columns}
        maps.setdefault(variant, []).append(role_map(when, heat, bounds))
        largest.append({"variant": variant, "when": when, **worst})
    roles = list(dict.fromkeys(role for row in largest for role in row))
    columns = [Column(role, role, "text") for role in roles[:2]]
    columns += [Column(role, short_role(role), digits=2) for role in roles[2:]]
    return {
        "formula": error.formula,
        "scale": [(level_style(bound, bounds), short_number(bound)) for bound in bounds],
        "rows": [(variant, numbers[variant], pair) for variant, pair in maps.items()],
        "largest": Table(f"{name}-largest", "Largest error over layers", columns, largest),
    }


def weight_rows(weights: Weights) -> list[dict[str, Any]]:
    """Return the measurement of every weight with its variant and when it was made."""
    times = ("before", "after")
    sides = [(of, *each) for of, *pair in weights for each in zip(times, pair, strict=True)]
    return [{"variant": of, "when": when, **row} for of, when, rows in sides for row in rows]


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


def _lines(rows: Rows, x: str, y: str, numbers: Numbers) -> list[Series]:
    return [replace(line, colour=numbers[line.label]) for line in lines(rows, x, y, by="variant")]


def _shared(columns: Sequence[Mapping[Any, Any]]) -> dict[Any, list[Any]]:
    """Return the values of all columns where all have one, in order."""
    places = sorted(set.intersection(*(set(column) for column in columns))) if columns else []
    return {place: [column[place] for column in columns] for place in places}


def _curve_rows(
    variant: str, split: str, metric: str, group: Sequence[Run]
) -> list[dict[str, Any]]:
    fixed = {"variant": variant, "split": split, "metric": metric, "seeds": len(group)}
    columns = []
    for run in group:
        rows = where(run.metrics, split=split)
        # older runs have vital signs by their last name alone
        values = ((int(r["step"]), r.get(f"vital/{metric}", r.get(metric))) for r in rows)
        columns.append({step: float(value) for step, value in values if is_finite(value)})
    return [
        {**fixed, "step": step, "mean": _mean(values), "low": min(values), "high": max(values)}
        for step, values in _shared(columns).items()
    ]


def _curve_panel(
    split: str, metric: str, rows: Rows, reference: Mapping[str, float], numbers: Numbers
) -> Panel:
    series = []
    for line in _lines(rows, "step", "mean", numbers):
        mine = where(rows, variant=line.label)
        band = ([row["low"] for row in mine], [row["high"] for row in mine])
        series.append(replace(line, band=band if mine[0]["seeds"] > 1 else ()))
    level = ("reference", reference[metric]) if split == "valid" and metric in reference else None
    words = metric_words(f"{metric},{split}")
    return Panel(words, "step", words, series, level=level)


def _certified_rows(variant: str, measured: Sequence[Any], axis: str) -> list[dict[str, Any]]:
    pairs = [
        dict(zip(getattr(run, axis), zip(run.certified, run.attacked, strict=True), strict=True))
        for run in measured
    ]
    fixed = {"variant": variant, "seeds": len(measured)}
    rows = []
    for at, values in _shared(pairs).items():
        certified, attacked = map(_mean, zip(*values, strict=True))
        rows.append({**fixed, "radius": at, "certified": certified, "attacked": attacked})
    return rows
