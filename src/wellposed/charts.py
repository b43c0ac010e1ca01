"""Line charts and histograms from rows of numbers, drawn with matplotlib as SVG files; free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from wellposed.measurement.figures import COLOURS, add_grid, figure_style, new_figure, note_image

Row = Mapping[str, Any]
Style = Literal["solid", "dashed", "dotted", "dots", "bars"]
_DASHES = {"solid": "-", "dashed": (0, (5, 1.5)), "dotted": (0, (1, 1.2)), "dots": ""}


@dataclass(frozen=True)
class Series:
    """One line (or cloud of points, or row of bars) of a panel."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: Style = "solid"
    colour: int | None = None
    """Number in the palette; the position in the panel where not given."""
    errors: Sequence[float] = ()
    """Half lengths of error bars, one a point; none where empty."""
    band: tuple[Sequence[float], Sequence[float]] | tuple[()] = ()
    """Lower and upper end of a shaded range, one a point."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series] = field(default_factory=list)
    x_scale: Literal["linear", "log", "symlog"] = "linear"
    y_scale: Literal["linear", "log"] = "linear"
    legend: bool = True
    names: Sequence[str] = ()
    """What stands at x = 0, 1, ... in place of numbers."""
    y_limits: tuple[float, float] | None = None
    level: tuple[str, float] | None = None
    """Name and height of a thin line across the panel."""


def where(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """Return the rows whose columns hold the wanted values.

    >>> where([{"layer": 1, "loss": 0.5}, {"layer": 2, "loss": 0.4}], layer=2)
    [{'layer': 2, 'loss': 0.4}]
    """
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def lines(
    rows: Sequence[Row], x: str, y: str, *, by: str | Callable[[Row], str], style: Style = "solid"
) -> list[Series]:
    """Return one series of column ``y`` over column ``x`` for each value of ``by``, in the order these come.

    >>> rows = [{"model": "a", "layer": 1, "loss": 0.5}, {"model": "a", "layer": 2, "loss": 0.4}]
    >>> [(line.label, line.x, line.y) for line in lines(rows, "layer", "loss", by="model")]
    [('a', [1, 2], [0.5, 0.4])]
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(by(row) if callable(by) else str(row[by]), []).append(row)
    return [Series(label, [row[x] for row in mine], [row[y] for row in mine], style) for label, mine in groups.items()]


def draw(panels: Sequence[Panel], path: Path, *, columns: int = 4) -> None:
    """Write ``panels`` side by side, ``columns`` in a row, as an SVG file without a date."""
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    with figure_style():
        figure = new_figure(max(4.6, 3.4 * columns), 3.1 * rows)
        grid = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        for axes, panel in zip(grid, panels, strict=False):
            draw_panel(axes, panel)
        note_image(path.stem, figure)
        # A page of unknown colour may show the file, so it brings its own.
        figure.savefig(path, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})


def draw_panel(axes: Any, panel: Panel) -> None:
    """Draw ``panel`` on a pair of axes of matplotlib; the marks of colour k carry the id ``variant-k``."""
    _draw_series(axes, panel)
    _label(axes, panel)
    add_grid(axes)
    if panel.level is not None:
        name, height = panel.level
        axes.axhline(height, color=COLOURS[-1], linewidth=1, linestyle=(0, (2, 2)))
        axes.annotate(
            name, (1, height), xycoords=("axes fraction", "data"), xytext=(0, 2), textcoords="offset points",
            ha="right", fontsize=7.5,
        )  # fmt: skip
    if panel.y_limits is not None:
        axes.set_ylim(*panel.y_limits)
    if panel.legend and len(panel.series) > 0:
        axes.legend(fontsize=7.5, handlelength=2.4)


def _draw_series(axes: Any, panel: Panel) -> None:
    for index, series in enumerate(panel.series):
        number = index if series.colour is None else series.colour
        colour = COLOURS[number % len(COLOURS)]
        if series.style == "bars":
            width = (series.x[1] - series.x[0]) if len(series.x) > 1 else 1.0
            axes.bar(series.x, series.y, width=width, color=colour, alpha=0.5, label=series.label)
            continue
        marker = "o" if len(series.x) <= 40 else None
        again = number >= len(COLOURS) and series.style == "solid"  # the colours are used up
        dash: Any = _DASHES["dotted" if again else series.style]
        axes.plot(
            series.x, series.y, color=colour, linestyle=dash or "none", linewidth=1.5, marker=marker, markersize=3,
            label=series.label, gid=f"variant-{number}",
        )  # fmt: skip
        if series.band:
            axes.fill_between(series.x, *series.band, color=colour, alpha=0.18, linewidth=0, gid=f"variant-{number}")
        if len(series.errors):
            axes.errorbar(series.x, series.y, series.errors, color=colour, linestyle="none", capsize=2)


def _label(axes: Any, panel: Panel) -> None:
    axes.set_title(panel.title, loc="left")
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    if panel.x_scale == "symlog":
        smallest = min((x for series in panel.series for x in series.x if x > 0), default=1.0)
        axes.set_xscale("symlog", linthresh=smallest)
    else:
        axes.set_xscale(panel.x_scale)
    axes.set_yscale(panel.y_scale)
    for axis, scale in ((axes.xaxis, panel.x_scale), (axes.yaxis, panel.y_scale)):
        if scale != "linear":
            # Powers are plain text: the house style does not parse mathematics.
            axis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_minor_formatter("")
    if panel.x_scale == "linear" and all(float(x).is_integer() for series in panel.series for x in series.x):
        axes.xaxis.get_major_locator().set_params(integer=True)  # layers, seeds and counts have no halves
    if len(places := {x for series in panel.series for x in series.x}) == 1 and panel.x_scale == "linear":
        axes.set_xticks(list(places))
    if panel.names:
        axes.set_xticks(range(len(panel.names)), panel.names, rotation=30, ha="right", rotation_mode="anchor")
