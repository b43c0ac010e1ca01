"""Figures of a task: rows of numbers over seeds, panels and captions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from typing import Any

from wellposed.measurement import (
    WEIGHT_COLUMNS,
    error_figure,
    heat_map,
    role_name,
    short_role,
)
from wellposed_lab.charts import Panel, Series, figure_of, fitted, lines, where
from wellposed_lab.report.aggregate import SPLITS, TaskComparison, metric_words
from wellposed_lab.report.html_table import CsvLink, csv_link
from wellposed_lab.report.runs import Run, is_finite

Numbers = Mapping[str, int]
"""Number of each variant on the page, for its colour and toggle."""
Groups = Mapping[str, Sequence[Run]]
"""The finished runs of each variant that has any, with their files read."""
Rows = Sequence[Mapping[str, Any]]
Weights = Sequence[tuple[str, Rows, Rows]]
VITALS = ("logit_max", "entropy", "update", "kurtosis")
"""Metrics of ``train --monitor`` to plot: the worst over heads, layers and weights."""
Figure = dict[str, Any]
"""Values for the template: title, drawing function, label, caption and data."""
SPECTRUM_POINTS = 48
WIDEST = 3.0
"""Longest interval that is fully drawn, as a multiple of the median."""
LEFT = {
    "certified": "certified: right under any change",
    "attacked": "attacked: right after the attack",
}
CERTIFIED: Mapping[str, Any] = {
    "certified": ("shares", "radius (median token norms)", "symlog"),
    "words": ("counts", "replaced words", "linear"),
}


def figure(
    title: str,
    name: str,
    panels: Sequence[Panel],
    caption: str,
    data: CsvLink | None,
    *,
    columns: int = 3,
    size: tuple[float, float] = (3.9, 2.9),
) -> Figure:
    """Return the figure of panels."""
    label = "; ".join(
        f"{panel.title} over {panel.x_label}: {', '.join(dict.fromkeys(s.label for s in panel.series))}"
        for panel in panels
    )
    draw = partial(figure_of, fitted(panels), columns=columns, size=size)
    about = {"label": label, "caption": caption, "data": data}
    return {"title": title, "name": name, "draw": draw, **about}


def differences_figure(
    name: str, task: TaskComparison, tests: Rows, numbers: Numbers
) -> Figure | None:
    """Plot the difference of each variant from the first with its interval, one panel per metric;
    None if there are no differences."""
    first, panels = task.variants[0].variant, []
    known = [row for row in tests if row["mean_difference"] is not None]
    for metric in dict.fromkeys(row["metric"] for row in known):
        mine = where(known, metric=metric)
        middles = [row["mean_difference"] for row in mine]
        ends = [row["mean_difference"] if row["high"] is None else row["high"] for row in mine]
        halves = [end - middle for end, middle in zip(ends, middles, strict=True)]
        reaches = [abs(middle) + half for middle, half in zip(middles, halves, strict=True)]
        # The interval of two seeds is twelve standard errors wide and would squash the others.
        reach = 1.05 * min(max(reaches), max(WIDEST * median(reaches), *map(abs, middles))) or 1.0
        series = [
            Series(
                row["variant"], [place], [row["mean_difference"]], "dots" if row["significant"] else "rings",
                numbers[row["variant"]], errors=[half] if half else [],
            )
            for place, (row, half) in enumerate(zip(mine, halves, strict=True))
        ]  # fmt: skip
        axis = f"difference; {'higher' if mine[0]['higher_is_better'] else 'lower'} is better"
        blank, limits = [""] * len(mine), (-reach, reach)
        words, level = metric_words(metric), (first, 0.0)
        panels.append(Panel(words, "", axis, series, names=blank, y_limits=limits, level=level))
    caption = (
        "Lines are 95 % intervals of the mean difference over the seeds that a variant shares with the"
        " first, without correction; intervals may extend beyond the edge. Filled marks are better"
        f" or worse in {metric_words(task.metric)}: a two-sided paired t-test gives p < 0.05 after"
        " Holm's correction for the number of variants, and four digits show the difference. No"
        " significant difference means that these seeds cannot decide, not that the variants are"
        " equal."
    )
    return figure(f"Difference from {first}", name, panels, caption, None) if panels else None


def rates_figure(name: str, rows: Rows, numbers: Numbers) -> Figure | None:
    """Plot the result of each variant on *valid* over the learning rate, for the loss and the
    metric that chose; None if rates were not compared."""
    known = [row for row in rows if is_finite(row["loss"])]
    if not known:
        return None
    headline = str(known[0]["metric"])
    if all(row["loss"] == row["value"] for row in known):
        headline = "loss"  # nats per character are the loss
    colours = dict.fromkeys((str(row["variant"]) for row in known), None) | dict(numbers)
    panels = []
    for metric, column in {"loss": "loss", headline: "value"}.items():
        words, series = metric_words(f"{metric},valid"), lines(known, "rate", column, by="variant")
        series = [replace(line, colour=colours[line.label]) for line in series]
        panels.append(Panel(words, "learning rate", words, series, "log"))
    caption = (
        "Validation of the runs that chose the learning rate of each variant: the first seed at every"
        " rate. The rate is that of the base, which some variants multiply. Runs that failed have no"
        " point."
    )
    data = csv_link(name, list(rows[0]), rows)
    return figure("Learning rates", name, panels, caption, data)


def curve_figures(
    name: str, task: TaskComparison, groups: Groups, numbers: Numbers
) -> list[Figure]:
    """Plot training loss, validation loss and the validation headline over steps, then vital signs.

    A mean is always over all seeds of a variant, so steps that some seed has not reached are left
    out.
    """
    headline = task.metric.partition(",")[0]
    places = [("train", "loss"), ("valid", "loss"), ("valid", headline)]
    titles = {"curves": "Training and validation", "vitals": "Vital signs"}
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
        # nats per character are the loss: one panel is enough
        twins = {
            str([f"{row['mean']:.9g}" for row in rows]): place for place, rows in drawn.items()
        }
        panels = [
            _curve_panel(*place, drawn[place], task.reference, numbers)
            for place in twins.values()
            if drawn[place]
        ]
        every = [row for rows in drawn.values() for row in rows]
        if every:
            data = csv_link(f"{name}-{part}", list(every[0]), every)
            figures.append(figure(titles[part], f"{name}-{part}", panels, caption, data))
    return figures


def certified_figures(name: str, groups: Groups, numbers: Numbers) -> list[Figure]:
    """Plot certified and attacked accuracy, over the radius and over the number of replaced words."""
    figures = []
    for part, (places, axis, scale) in CERTIFIED.items():
        rows: list[dict[str, Any]] = []
        every = [
            (of, record)
            for of, runs in groups.items()
            for run in runs
            if (record := getattr(run, part))
        ]
        for variant in dict.fromkeys(of for of, _ in every):
            mine = [record for of, record in every if of == variant]
            fixed = {"variant": variant, "seeds": len(mine)}
            pairs = [zip(run.certified, run.attacked, strict=True) for run in mine]
            axes = [getattr(run, places) for run in mine]
            columns = [dict(zip(*column, strict=True)) for column in zip(axes, pairs, strict=True)]
            for at, values in _shared(columns).items():
                certified, attacked = map(fmean, zip(*values, strict=True))
                rows.append({**fixed, "radius": at, "certified": certified, "attacked": attacked})
        if not rows:
            continue
        panels = [
            Panel(title, axis, "accuracy", series, scale, y_limits=(0, 1.02))
            for what, title in LEFT.items()
            for series in [_lines(rows, "radius", what, numbers)]
        ]
        caption = _certified_caption([record for _, record in every], part)
        data = csv_link(f"{name}-{part}", list(rows[0]), rows)
        title = "Certified against attacked accuracy"
        figures.append(figure(title, f"{name}-{part}", panels, caption, data))
    return figures


def _certified_caption(measured: Sequence[Any], part: str) -> str:
    """Return the caption: the examples, their split, the norm and the attack."""
    if part == "words":
        return (
            "Accuracy after this many words of a text are replaced by any words of the vocabulary:"
            " certified (0 without a certificate), and under a greedy attack. Mean over"
            " seeds."
        )
    examples, splits, norms, attacks = (
        ", ".join(dict.fromkeys(SPLITS.get(split, split) for split in map(str, values)))
        for values in zip(*((r.examples, r.split, r.norm, r.attack) for r in measured), strict=True)
    )
    return (
        f"Accuracy on {examples} {splits} examples when every embedded token moves by up to the"
        f" radius (norm {norms}): certified, and under the attack"
        f" ({attacks}). Mean over seeds."
    )


def spectra_figure(name: str, weights: Weights, numbers: Numbers) -> Figure | None:
    """Plot singular values after training, a panel per role and a line per variant: the median over
    layers with its range; dashed, the median before training."""
    import numpy as np

    places = (np.arange(SPECTRUM_POINTS) + 0.5) / SPECTRUM_POINTS

    def curve(values: Sequence[float]) -> Any:
        largest_first = np.sort(np.asarray(values, float))[::-1]
        return np.interp(places, (np.arange(len(values)) + 0.5) / len(values), largest_first)

    drawn: dict[str, list[Series]] = {}
    for variant, *pair in weights:
        line = partial(Series, variant, places.tolist(), colour=numbers[variant])
        for rows, style in zip(pair[::-1], ("solid", "dashed"), strict=True):
            spectra: dict[str, list[Any]] = {}
            for row in rows:
                if row.get("singular_values"):
                    spectra.setdefault(role_name(row), []).append(curve(row["singular_values"]))
            for role, given in spectra.items():
                curves = np.stack(given)
                band = (curves.min(0).tolist(), curves.max(0).tolist()) if style == "solid" else ()
                middle = np.median(curves, 0).tolist()
                drawn.setdefault(role, []).append(line(middle, style, band=band))
    # Embeddings have other sizes than the weights of layers.
    axes = {role: "of embeddings" if role.endswith("_embedding") else "of layers" for role in drawn}
    panels = [Panel(short_role(role), "share", axes[role], lines) for role, lines in drawn.items()]
    columns = ["variant", "when", *WEIGHT_COLUMNS, "singular_values"]
    rows = weight_rows(weights)
    for row in rows:
        row[columns[-1]] = " ".join(f"{v:.6g}" for v in row.get(columns[-1]) or ())
    caption = (
        "Singular values, largest first, over their relative rank: the median over layers after training,"
        " shaded from the lowest layer to the highest; dashed: the median before training. The CSV has"
        " all numbers of every weight, before and after."
    )
    settings = {"columns": 4, "size": (2.9, 2.2)}
    data = csv_link(name, columns, rows)
    return figure("Singular values", name, panels, caption, data, **settings) if panels else None


def orthogonality_figure(name: str, weights: Weights) -> Figure | None:
    """Plot the orthogonality errors of all variants, before and after training, as one map; None if
    no weight belongs to a layer."""
    rows = []
    for row in weight_rows(weights):
        when = {"before": "at start", "after": "in the end"}[row["when"]]
        stack = f"{row['variant']} {row['stack']}"
        rows.append({**row, "stack": stack, "role": f"{row['role']} {when}"})
    roles = list(dict.fromkeys(role_name(row) for row in weight_rows(weights)))
    rows.sort(key=lambda row: roles.index(role_name(row).partition(" ")[0]))
    heat = heat_map(rows, "scale_free_orthogonality_error")
    if not heat.values:
        return None
    caption = (
        "err_orth = |W Wᵀ / s - I| / |I| at the best scale s (of the smaller Gram matrix), mean over seeds;"
        " 0 is orthogonal. Of several weights of one layer and role, such as experts, the largest."
    )
    return {
        "title": "Orthogonality error",
        "name": name,
        "draw": partial(error_figure, heat),
        "label": f"orthogonality error by layer and role of {', '.join(of for of, *_ in weights)}",
        "caption": caption,
        "data": None,
    }


def weight_rows(weights: Weights) -> list[dict[str, Any]]:
    """Return the measurement of every weight, with its variant and time."""
    times = ("before", "after")
    sides = [(of, *values) for of, *pair in weights for values in zip(times, pair, strict=True)]
    return [{"variant": of, "when": when, **row} for of, when, rows in sides for row in rows]


def mean_rows(measurements: Sequence[Rows]) -> list[dict[str, Any]]:
    """Average the numbers of each weight over seeds; spectra value by value, largest first."""
    averaged = []
    for twins in zip(*measurements, strict=True):
        row = dict(twins[0])
        for name, value in twins[0].items():
            values = [twin.get(name) for twin in twins]
            if name == "singular_values":
                row[name] = [fmean(column) for column in zip(*values, strict=True)]
            elif isinstance(value, float):
                row[name] = None if any(v is None for v in values) else fmean(values)
        averaged.append(row)
    return averaged


def _lines(rows: Rows, x: str, y: str, numbers: Numbers) -> list[Series]:
    return [replace(line, colour=numbers[line.label]) for line in lines(rows, x, y, by="variant")]


def _shared(columns: Sequence[Mapping[Any, Any]]) -> dict[Any, list[Any]]:
    """Return the values of all columns at the keys that all columns have, in order."""
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
        {**fixed, "step": step, "mean": fmean(values), "low": min(values), "high": max(values)}
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
