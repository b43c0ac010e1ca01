"""Figures of a task: rows of numbers over seeds, panels and captions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from typing import Any

from wellposed.measurement import WEIGHT_COLUMNS, role_name, short_role
from wellposed_lab import charts
from wellposed_lab.charts import Panel, Series, Style, lines, where
from wellposed_lab.report.comparison import TaskComparison
from wellposed_lab.report.html_table import CsvLink, csv_link
from wellposed_lab.report.metric_words import SPLITS, metric_words
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
"""Values for the template: title, legend, an SVG element per panel, caption and data."""
SPECTRUM_POINTS = 48
WIDEST = 3.0
"""Longest interval that is fully drawn, as a multiple of the median."""
SIZE = (3.5, 2.5)
"""Size of a panel in inches: a phone shows it whole."""
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
    folded: bool = False,
) -> Figure:
    """Return a figure of panels, one SVG element each, with one legend."""
    drawings = []
    legend = {}
    for index, panel in enumerate(charts.fitted(panels)):
        names = dict.fromkeys(series.label for series in panel.series)
        label = f"{panel.title}: {panel.y_label} over {panel.x_label}; {', '.join(names)}"
        draw = partial(charts.figure_of, [replace(panel, legend=False)], size=SIZE)
        drawings.append(charts.embedded(draw, f"{name}-{index}", label))
        for series in panel.series:
            rounds, colour = divmod(series.colour or 0, len(charts.COLOURS))
            legend[series.label] = (charts.COLOURS[colour], rounds > 0)

    notes = (f"{panel.title}: {charts.coinciding_note(panel)}" for panel in panels)
    together = "; ".join(note for note in notes if not note.endswith(": "))
    if together:
        caption = f"{caption} Drawn with alternating dashes: {together}."
    parts = {"title": title, "legend": legend, "panels": drawings}
    return {**parts, "caption": caption, "data": data, "folded": folded}


def differences_figure(
    name: str, task: TaskComparison, tests: Rows, numbers: Numbers, worth: float | None
) -> Figure | None:
    """Plot the difference of each variant from the first with its interval, one panel per metric;
    None if no difference has an interval."""
    first = task.variants[0].variant
    panels = []
    tested = [row for row in tests if row["mean_difference"] is not None]
    if not any(row["high"] is not None for row in tested):
        return None

    for metric in dict.fromkeys(row["metric"] for row in tested):
        mine = where(tested, metric=metric)
        required = task.least_gain(metric, worth)
        middles = [row["mean_difference"] for row in mine]
        ends = [row["mean_difference"] if row["high"] is None else row["high"] for row in mine]
        halves = [end - middle for end, middle in zip(ends, middles, strict=True)]
        reaches = [abs(middle) + half for middle, half in zip(middles, halves, strict=True)]
        # The interval of two seeds is twelve standard errors wide and would squash the others.
        reach = 1.05 * min(max(reaches), max(WIDEST * median(reaches), *map(abs, middles))) or 1.0
        series = []
        for index, (row, half) in enumerate(zip(mine, halves, strict=True)):
            variant = row["variant"]
            middle = row["mean_difference"]
            errors = [half] if half else []
            mark: Style = "dots" if row["significant"] and abs(middle) >= required else "rings"
            series.append(Series(variant, [index], [middle], mark, numbers[variant], errors))
        axis = f"difference; {'higher' if mine[0]['higher_is_better'] else 'lower'} is better"
        look: Any = {"names": [""] * len(mine), "y_limits": (-reach, reach), "level": (first, 0.0)}
        panel = Panel(
            metric_words(metric), "variant, in the order of the legend", axis, series, **look
        )
        panels.append(panel)

    caption = (
        "Lines are 95 % intervals of the mean difference over the seeds that a variant shares with the"
        " first, without correction; intervals may extend beyond the edge. A mark is filled if the"
        f" difference is significant and large enough: {task.least_gain(task.metric, worth):.3g} in"
        f" {metric_words(task.metric)}, a hundredth of {first}'s mean in other metrics. Significant:"
        " a two-sided paired t-test gives p < 0.05 after Holm's correction for the number of variants."
        " No significant difference means that these seeds cannot decide, not that the variants are"
        " equal."
    )
    title = f"Differences from {first}, with intervals"

    return figure(title, name, panels, caption, None, folded=True)


def rates_figure(name: str, rows: Rows, numbers: Numbers) -> Figure | None:
    """Plot the result of each variant on *valid* over the learning rate, for the loss and the
    metric that chose; None if rates were not compared."""
    finite = [row for row in rows if is_finite(row["loss"])]
    if not finite:
        return None

    headline = str(finite[0]["metric"])
    if all(row["loss"] == row["value"] for row in finite):
        headline = "loss"  # nats per character are the loss

    colours = dict.fromkeys((str(row["variant"]) for row in finite), None) | dict(numbers)
    panels = []
    for metric, column in {"loss": "loss", headline: "value"}.items():
        words = metric_words(f"{metric},valid")
        series = lines(finite, "rate", column, by="variant")
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
    vitals = [("monitor", vital) for vital in VITALS]
    parts = {"curves": ("Training and validation", places), "vitals": ("Vital signs", vitals)}
    caption = "One seed."
    if any(len(runs) > 1 for runs in groups.values()):
        caption = "Mean over seeds; the band reaches from the lowest seed to the highest."

    figures = []
    for part, (title, wanted) in parts.items():
        drawn = {
            curve: [
                row
                for variant, runs in groups.items()
                for row in _curve_rows(variant, *curve, runs)
            ]
            for curve in dict.fromkeys(wanted)
        }
        # nats per character are the loss: one panel is enough
        twins = {
            str([f"{row['mean']:.9g}" for row in rows]): curve for curve, rows in drawn.items()
        }
        visible = [(curve, drawn[curve]) for curve in twins.values() if drawn[curve]]
        panels = [_curve_panel(*curve, rows, task.reference, numbers) for curve, rows in visible]
        every = [row for rows in drawn.values() for row in rows]
        if every:
            data = csv_link(f"{name}-{part}", list(every[0]), every)
            figures.append(figure(title, f"{name}-{part}", panels, caption, data))

    return figures


def certified_figures(name: str, groups: Groups, numbers: Numbers) -> list[Figure]:
    """Plot certified and attacked accuracy over the radius, and over the number of replaced words."""
    figures = []
    for part, (places, axis, scale) in CERTIFIED.items():
        rows: list[dict[str, Any]] = []
        measured: list[Any] = []
        for variant, runs in groups.items():
            mine = [getattr(run, part) for run in runs if getattr(run, part)]
            measured += mine
            fixed = {"variant": variant, "seeds": len(mine)}
            pairs = [zip(run.certified, run.attacked, strict=True) for run in mine]
            axes = [getattr(run, places) for run in mine]
            columns = [dict(zip(*column, strict=True)) for column in zip(axes, pairs, strict=True)]
            for at, values in _shared(columns).items():
                certified, attacked = map(fmean, zip(*values, strict=True))
                rows.append({**fixed, "radius": at, "certified": certified, "attacked": attacked})
        if not rows:
            continue
        series = _lines(rows, "radius", "certified", numbers)
        series += _lines(rows, "radius", "attacked", numbers, "dashed")
        panels = [Panel("right answers", axis, "accuracy", series, scale, y_limits=(0, 1.02))]
        caption = _certified_caption(measured, part)
        data = csv_link(f"{name}-{part}", list(rows[0]), rows)
        title = "Certified against attacked accuracy"
        figures.append(figure(title, f"{name}-{part}", panels, caption, data))
    return figures


def _certified_caption(measured: Sequence[Any], part: str) -> str:
    """Return the caption: the examples, their split, the norm and the attack."""
    if part == "words":
        return (
            "Accuracy after this many words of a text are replaced by any words of the vocabulary:"
            " certified (solid; 0 without a certificate), and under a greedy attack (dashed)."
            " Mean over seeds."
        )
    examples, splits, norms, attacks = (
        ", ".join(dict.fromkeys(SPLITS.get(split, split) for split in map(str, values)))
        for values in zip(*((r.examples, r.split, r.norm, r.attack) for r in measured), strict=True)
    )
    return (
        f"Accuracy on {examples} {splits} examples when every embedded token moves by up to the"
        f" radius (norm {norms}): certified, and under the attack (dashed; {attacks}). Mean over"
        " seeds."
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
            for role, layers in spectra.items():
                curves = np.stack(layers)
                band = (curves.min(0).tolist(), curves.max(0).tolist()) if style == "solid" else ()
                middle = np.median(curves, 0).tolist()
                drawn.setdefault(role, []).append(line(middle, style, band=band))
    # Embeddings have other sizes than the weights of layers.
    kinds = {role: "embeddings" if role.endswith("_embedding") else "layers" for role in drawn}
    axes = {role: ("relative rank", f"singular value of {kinds[role]}") for role in drawn}
    panels = [Panel(short_role(role), *axes[role], lines) for role, lines in drawn.items()]
    columns = ["variant", "when", *WEIGHT_COLUMNS, "singular_values"]
    rows = weight_rows(weights)
    for row in rows:
        row[columns[-1]] = " ".join(f"{v:.6g}" for v in row.get(columns[-1]) or ())
    caption = (
        "Singular values, largest first, over their relative rank: the median over layers after training,"
        " shaded from the lowest layer to the highest; dashed: the median before training. The CSV has"
        " all numbers of every weight, before and after."
    )
    data = csv_link(name, columns, rows)
    return figure("Singular values", name, panels, caption, data, folded=True) if panels else None


def orthogonality_figure(name: str, weights: Weights, numbers: Numbers) -> Figure | None:
    """Plot the orthogonality error over layers, a panel per role and a line per variant; None if no
    weight belongs to a layer."""
    rows = [row for row in weight_rows(weights) if row.get("layer") is not None]
    stacks = {row["stack"] for row in rows}
    curves: dict[str, dict[tuple[str, str], dict[int, float]]] = {}
    for row in rows:
        role = short_role(role_name(row))
        error = row.get("scale_free_orthogonality_error")
        title = role if len(stacks) == 1 else f"{row['stack']} {role}"
        if error is not None:
            curve = curves.setdefault(title, {}).setdefault((row["variant"], row["when"]), {})
            curve[row["layer"]] = max(error, curve.get(row["layer"], 0.0))

    styles: dict[str, Style] = {"before": "dashed", "after": "solid"}
    panels = []
    for title, mine in curves.items():
        series = [
            Series(variant, [*curve], [*curve.values()], styles[when], numbers[variant])
            for (variant, when), curve in mine.items()
        ]
        panels.append(Panel(title, "layer", "orthogonality error", series))

    caption = (
        "err_orth = |W Wᵀ / s - I| / |I| at the best scale s (of the smaller Gram matrix) after"
        " training, mean over seeds; dashed: before training. 0 is orthogonal. Of several weights of"
        " one layer and role, such as experts, the largest. The CSV of the singular values has all"
        " numbers."
    )
    title = "Orthogonality error"
    return figure(title, name, panels, caption, None, folded=True) if panels else None


def weight_rows(weights: Weights) -> list[dict[str, Any]]:
    """Return the measurement of every weight, with its variant and time."""
    times = ("before", "after")
    sides = [
        (variant, *values) for variant, *pair in weights for values in zip(times, pair, strict=True)
    ]
    return [
        {"variant": variant, "when": when, **row} for variant, when, rows in sides for row in rows
    ]


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


def _lines(rows: Rows, x: str, y: str, numbers: Numbers, style: Style = "solid") -> list[Series]:
    drawn = lines(rows, x, y, by="variant", style=style)
    return [replace(line, colour=numbers[line.label]) for line in drawn]


def _shared(columns: Sequence[Mapping[Any, Any]]) -> dict[Any, list[Any]]:
    """Return the values of all columns at the keys that all columns have, in order."""
    places = sorted(set.intersection(*(set(column) for column in columns))) if columns else []
    return {index: [column[index] for column in columns] for index in places}


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
