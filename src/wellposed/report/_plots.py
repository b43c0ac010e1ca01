"""The figures of a task: curves, certified accuracy, orthogonality before and after, spectra before and after."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from wellposed.measurement.figures import (
    COLOURS,
    ErrorShown,
    add_colour_bar,
    add_grid,
    draw_heat_map,
    draw_spectra,
    error_shown,
    figure_style,
    heat_map,
    new_figure,
    shared_log_norm,
    short_role,
    spectra_by_role,
    svg_markup,
)
from wellposed.report._certified import CertifiedCurve
from wellposed.report._curves import Curve

DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)))
Rows = Sequence[Mapping[str, Any]]
Weights = Sequence[tuple[str, Rows, Rows]]


def curves_figure(
    panels: Mapping[tuple[str, str], Sequence[Curve]], reference: Mapping[str, float], order: Sequence[str], prefix: str
) -> str:
    """Draw one panel per split and metric, a line per variant, its band from the lowest to the highest seed."""
    with figure_style():
        figure = new_figure(3.55 * len(panels) + 0.1, 3.3)
        axes_row = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, ((split, metric), curves) in zip(axes_row, panels.items(), strict=True):
            for curve in curves:
                style = _line_style(order.index(curve.variant))
                marker = "o" if len(curve.steps) <= 40 and split != "train" else None
                axes.plot(curve.steps, curve.mean, label=curve.variant, marker=marker, markersize=3, **style)
                if curve.seeds > 1:
                    axes.fill_between(curve.steps, curve.low, curve.high, color=style["color"], alpha=0.18, linewidth=0)
            if split != "train" and metric in reference:
                axes.axhline(reference[metric], color="#888888", linewidth=1, linestyle=(0, (2, 2)))
                axes.annotate(
                    "reference", (1, reference[metric]), xycoords=("axes fraction", "data"), xytext=(0, 2),
                    textcoords="offset points", ha="right", fontsize=7.5,
                )  # fmt: skip
            axes.set_title(f"{_words(metric)}, {split}", loc="left")
            axes.set_xlabel("step")
            add_grid(axes)
        handles, labels = axes_row[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=min(len(labels), 6), handlelength=2.8)
        names = ", ".join(f"{_words(metric)} on {split}" for split, metric in panels)
        return svg_markup(
            figure, prefix=prefix, label=f"Line charts over training steps: {names}; variants {', '.join(order)}."
        )


def certified_figure(curves: Sequence[CertifiedCurve], order: Sequence[str], prefix: str) -> str:
    """Draw accuracy against radius: certified as solid lines, under attack as dashed ones of the same colour."""
    with figure_style():
        figure = new_figure(6.4, 3.6)
        axes = figure.subplots()
        for curve in curves:
            colour = COLOURS[order.index(curve.variant) % len(COLOURS)]
            line = {"color": colour, "marker": "o", "markersize": 3, "linewidth": 1.6}
            axes.plot(curve.shares, curve.certified, label=curve.variant, **line)
            axes.plot(curve.shares, curve.attacked, linestyle="--", **line)
        smallest = min((share for curve in curves for share in curve.shares if share > 0), default=1.0)
        axes.set_xscale("symlog", linthresh=smallest)
        axes.set_ylim(bottom=0)
        shares = sorted({share for curve in curves for share in curve.shares})
        axes.set_xticks(shares, [f"{share:g}" for share in shares])
        axes.minorticks_off()
        axes.set_title("accuracy: certified (solid), under attack (dashed)", loc="left")
        axes.set_xlabel("radius, in units of the median token norm")
        add_grid(axes)
        figure.legend(loc="outside lower left", ncols=min(len(curves), 6), handlelength=2.8)
        names = ", ".join(curve.variant for curve in curves)
        return svg_markup(
            figure, prefix=prefix, label=f"Line chart of certified and attacked accuracy by radius, for {names}."
        )


def orthogonality_figure(weights: Weights, prefix: str) -> str:
    """Draw err_orth as layers x roles, before and after training, one line of maps per variant, one colour scale."""
    error = weights_error(weights)
    with figure_style():
        maps = [[heat_map(rows, error.name) for rows in (before, after)] for _, before, after in weights]
        norm = shared_log_norm([heat for pair in maps for heat in pair])
        first = maps[0][0]
        same_roles = len({tuple(heat.roles) for pair in maps for heat in pair}) == 1
        height = 0.55 + 0.26 * max(len(heat.layers) for pair in maps for heat in pair)
        figure = new_figure(max(6.0, 2.6 + 1.15 * len(first.roles)), 0.7 + height * len(weights))
        axes = figure.subplots(len(weights), 2, squeeze=False, sharex=same_roles, sharey=False)
        mesh = None
        for (variant, _, _), (before, after), (left, right) in zip(weights, maps, axes, strict=True):
            mesh = draw_heat_map(left, before, norm, f"{variant}: before")
            draw_heat_map(right, after, norm, "after")
            right.set_yticklabels([])
        add_colour_bar(figure, mesh, axes, "err_orth")
        what = "Heat maps of the orthogonality error by layer and role, before and after training"
        label = f"{what}, for {_listing(weights)}."
        return svg_markup(figure, prefix=prefix, label=label)


def weights_error(weights: Weights) -> ErrorShown:
    """Return the orthogonality error that all the measurements hold."""
    return error_shown(row for _, before, after in weights for row in (*before, *after))


def spectra_figure(weights: Weights, prefix: str) -> str | None:
    """Draw singular values by role (columns) and variant (lines), dashed before and solid after training."""
    curves = [
        (variant, spectra_by_role(before, dashed=True), spectra_by_role(after)) for variant, before, after in weights
    ]
    roles = list(dict.fromkeys(role for _, before, after in curves for role in (*before, *after)))
    if not roles:
        return None
    with figure_style():
        figure = new_figure(max(6.0, 1.6 * len(roles) + 0.5), 1.75 * len(curves) + 0.5)
        grid = figure.subplots(len(curves), len(roles), squeeze=False, sharex=True, sharey="col")
        for (variant, before, after), line in zip(curves, grid, strict=True):
            for axes, role in zip(line, roles, strict=True):
                draw_spectra(axes, [*before.get(role, []), *after.get(role, [])], "")
                axes.tick_params(labelsize=7.5)
                axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
                axes.locator_params(axis="y", nbins=3)
            line[0].set_ylabel(variant)
        for axes, role in zip(grid[0], roles, strict=True):
            axes.set_title(short_role(role), loc="left")
        figure.supxlabel("share of singular values, largest first", fontsize=9)
        label = f"Singular values by role before and after training, for {_listing(weights)}."
        return svg_markup(figure, prefix=prefix, label=label)


def mean_rows(measurements: Sequence[Rows]) -> list[dict[str, Any]]:
    """Average the numbers of the same weight over seeds; spectra are averaged value by value, largest first."""
    averaged = []
    for twins in zip(*measurements, strict=True):
        row = dict(twins[0])
        for name, value in twins[0].items():
            values = [twin.get(name) for twin in twins]
            if name == "singular_values":
                row[name] = [math.fsum(column) / len(column) for column in zip(*values, strict=True)]
            elif isinstance(value, float):
                row[name] = None if any(v is None for v in values) else math.fsum(values) / len(values)
        averaged.append(row)
    return averaged


def _line_style(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)], "linewidth": 1.6}


def _listing(weights: Weights) -> str:
    return ", ".join(variant for variant, _, _ in weights)


def _words(metric: str) -> str:
    return "loss (nats)" if metric == "loss" else metric.replace("_", " ")
