"""Line panels of a page: inline SVG whose lines follow the toggles of variants, with values under
the pointer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from typing import Any

from wellposed.charts import (
    COLOURS,
    Panel,
    Series,
    draw_panel,
    figure_style,
    new_figure,
    svg_markup,
)
from wellposed.text_table import format_number

SIZE = (4.0, 2.9)
"""Inches; a page of 390 px shows a panel at its full size."""
HOVER_POINTS = 400


def panel_svg(panel: Panel, prefix: str) -> Any:
    """Draw one panel. A series' colour is the number of its variant on the page."""
    from markupsafe import Markup

    with figure_style():
        figure = new_figure(*SIZE)
        figure.set_dpi(72)  # of SVG: positions below are those of the file
        axes = figure.subplots()
        draw_panel(axes, panel)
        names = "; ".join(series.label for series in panel.series)
        markup = svg_markup(
            figure, prefix=prefix, label=f"{panel.title} over {panel.x_label}: {names}"
        )
        values = json.dumps(_hover(panel, axes), separators=(",", ":"))
    markup = re.sub(rf'\bid="{prefix}-variant-(\d+)"', r'data-variant="\1"', markup)
    for number, colour in enumerate(COLOURS):
        markup = markup.replace(colour, f"var(--c{number})")
    markup = re.sub(r"<style.*?</style>", "", markup, flags=re.DOTALL)
    return Markup(
        markup.replace("<svg ", f'<svg tabindex="0" data-hover="{escape(values, quote=True)}" ', 1)
    )


def _hover(panel: Panel, axes: Any) -> dict[str, Any]:
    """Return, for every x that has a value, its place in the drawing and what each series says
    there."""
    places = sorted({x for series in panel.series for x in series.x})
    if len(places) > HOVER_POINTS:
        places = [
            places[round(i * (len(places) - 1) / (HOVER_POINTS - 1))] for i in range(HOVER_POINTS)
        ]
    said = [_said(series) for series in panel.series]
    pixels = axes.transData.transform([(x, axes.get_ylim()[0]) for x in places])[:, 0]
    points = [
        [round(float(pixel), 1), f"{panel.x_label}: {x:.4g}", [each.get(x, "") for each in said]]
        for x, pixel in zip(places, pixels, strict=True)
    ]
    return {"series": [[each.colour or 0, each.label] for each in panel.series], "points": points}


def _said(series: Series) -> dict[float, str]:
    values = [format_number(float(y)) for y in series.y]
    if series.band:
        ends = [[format_number(float(end)) for end in side] for side in series.band]
        values = [f"{value} ({a} to {b})" for value, a, b in zip(values, *ends, strict=True)]
    return dict(zip(series.x, values, strict=True))


def common_limits(panels: Sequence[Panel]) -> tuple[float, float] | None:
    """Return the y-limits that hold every value of ``panels``, with a margin."""
    series = [each for panel in panels for each in panel.series]
    values = [value for each in series for line in (each.y, *each.band) for value in line]
    values += [panel.level[1] for panel in panels if panel.level]
    if not values:
        return None
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin
