"""Figures drawn with matplotlib: line charts and histograms from rows of numbers, as SVG files.

Free of torch and of pyplot's global state: a figure here is an object, never the current one.
"""

from __future__ import annotations

import io
import math
import statistics
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from wellposed.errors import import_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#0a0b0c"
"""Text and axes are drawn in this colour, which pages of both colours replace."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a")
"""Okabe and Ito (2008): told apart with any kind of colour vision; grey is last, and black is left
out for dark pages."""

_FEW_POWERS = 50
_LEGEND_LINE = 0.16
Row = Mapping[str, Any]
Style = Literal["solid", "dashed", "dotted", "dots", "bars", "boxes"]
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
    """Lower and upper end, one a point, of a shaded range, or of the box around the median
    ``y``."""
    whiskers: tuple[Sequence[float], Sequence[float]] | tuple[()] = ()
    """Ends of the lines that leave a box."""


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
    """Return one series of column ``y`` over column ``x`` for each value of ``by``, in the order
    these come.

    >>> rows = [{"model": "a", "layer": 1, "loss": 0.5}, {"model": "a", "layer": 2, "loss": 0.4}]
    >>> [(line.label, line.x, line.y) for line in lines(rows, "layer", "loss", by="model")]
    [('a', [1, 2], [0.5, 0.4])]
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(by(row) if callable(by) else str(row[by]), []).append(row)
    return [
        Series(label, [row[x] for row in mine], [row[y] for row in mine], style)
        for label, mine in groups.items()
    ]


def medians(
    rows: Sequence[Row], x: str, y: str, *, by: str | Callable[[Row], str], style: Style = "solid"
) -> list[Series]:
    """Return what `lines` does of the median over rows that share ``x``, as seeds do, shaded from
    least to greatest.

    >>> rows = [{"model": "a", "layer": 1, "loss": value} for value in (0.5, 0.4, 0.9)]
    >>> [(line.x, line.y, line.band) for line in medians(rows, "layer", "loss", by="model")]
    [([1], [0.5], ([0.4], [0.9]))]
    """
    found = []
    for line in lines(rows, x, y, by=by, style=style):
        values: dict[float, list[float]] = {}
        for at, value in zip(line.x, line.y, strict=True):
            values.setdefault(at, []).append(value)
        middle, *band = (list(map(of, values.values())) for of in (statistics.median, min, max))
        found.append(replace(line, x=list(values), y=middle, band=tuple(band)))
    return found


def draw(panels: Sequence[Panel], path: Path, *, columns: int | None = None) -> None:
    """Write ``panels`` side by side as an SVG file without a date.

    In a row stand ``columns``, else four, or three where that fills the rows. Panels whose axes
    have the same label and scale share them, so that what they show can be compared.
    """
    with figure_style():
        # A page of unknown colour may show the file, so it brings its own. Tight: a legend under a
        # panel may be longer than the place that the layout left.
        how: Any = {"format": "svg", "facecolor": "white", "bbox_inches": "tight"}
        undated: Any = {"Date": None, "Creator": None}
        _drawn(panels, columns).savefig(path, metadata=undated, **how)


def pixels(panels: Sequence[Panel]) -> Any:
    """Return what `draw` draws as an array, (height, width, 3) uint8."""
    import numpy as np
    from matplotlib.image import imread

    out = io.BytesIO()
    with figure_style():
        _drawn(panels, None).savefig(out, format="png", facecolor="white", dpi=100)
    out.seek(0)
    return np.round(imread(out)[..., :3] * 255).astype(np.uint8)


def _drawn(panels: Sequence[Panel], columns: int | None) -> Figure:
    wide = 3 if len(panels) % 4 and len(panels) % 3 == 0 else 4
    columns = min(columns or wide, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(max(4.6, 3.4 * columns), 3.1 * rows)
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    pairs = list(zip(grid, panels, strict=False))
    _share_axes(pairs)
    for axes, panel in pairs:
        _draw_series(axes, panel)
        _label(axes, panel, title_width=int(13 * max(3.4, 4.6 / columns)))
    for axes, panel in pairs:
        _finish(axes, panel)
    _add_legends(figure, pairs)
    return figure


def _share_axes(pairs: Sequence[tuple[Any, Panel]]) -> None:
    first: dict[tuple[str, str, str], Any] = {}
    for axes, panel in pairs:
        sides = {"x": (panel.x_label, panel.x_scale), "y": (panel.y_label, panel.y_scale)}
        for side, of in sides.items():
            other = first.setdefault((side, *of), axes)
            if other is not axes and of[0] and not (side == "x" and panel.names):
                getattr(axes, f"share{side}")(other)


def _add_legends(figure: Any, pairs: Sequence[tuple[Any, Panel]]) -> None:
    """Put one legend under the figure where a label looks the same in every panel, else one under
    each panel."""
    legends = [(axes, panel) for axes, panel in pairs if panel.legend and panel.series]
    shown = [(*each, _handles(*each)) for each in legends]
    looks: dict[str, set[object]] = {}
    for _, panel in pairs:
        own: dict[str, list[object]] = {}
        for number, series in enumerate(panel.series):
            look = series.style, number if series.colour is None else series.colour
            own.setdefault(series.label, []).append(look)
        for label, look in own.items():
            looks.setdefault(label, set()).add(tuple(look))
    style: dict[str, Any] = {"fontsize": 7.5, "handlelength": 2.4}
    if not shown:
        return
    if all(len(each) == 1 for each in looks.values()):
        every = {label: found[label] for _, _, found in reversed(shown) for label in found}
        handles = {label: every[label] for label in looks if label in every}
        columns = max(1, int(figure.get_figwidth() / (0.55 + 0.065 * max(map(len, handles)))))
        style |= {"loc": "outside lower left", "ncols": columns}
        figure.legend(handles.values(), handles.keys(), **style)
        lines = -(-len(handles) // columns)
    else:
        style |= {"loc": "upper left", "borderaxespad": 0}
        for axes, panel, found in shown:
            at = (0, -0.42 if panel.names else -0.22)
            axes.legend(found.values(), found.keys(), bbox_to_anchor=at, **style)
        rows = figure.axes[0].get_subplotspec().get_gridspec().nrows
        lines = rows * max(len(found) for _, _, found in shown)
    figure.set_figheight(figure.get_figheight() + _LEGEND_LINE * lines)


def _handles(axes: Any, panel: Panel) -> dict[str, Any]:
    handles, labels = axes.get_legend_handles_labels()
    found = dict(zip(reversed(labels), reversed(handles), strict=True))
    # matplotlib leaves labels that start with "_" out of legends.
    return {series.label: found[series.label] for series in panel.series if series.label in found}


def _draw_series(axes: Any, panel: Panel) -> None:
    for index, series in enumerate(panel.series):
        number = index if series.colour is None else series.colour
        colour = COLOURS[number % len(COLOURS)]
        if series.style == "bars":
            width = (series.x[1] - series.x[0]) if len(series.x) > 1 else 1.0
            axes.bar(series.x, series.y, width=width, color=colour, alpha=0.5, label=series.label)
            continue
        if series.style == "boxes":
            rivals = [each.label for each in panel.series if each.style == "boxes"]
            _draw_boxes(axes, series, colour, rivals.index(series.label), len(rivals))
            continue
        marker = "o" if len(series.x) <= 40 else None
        again = number >= len(COLOURS) and series.style == "solid"  # the colours are used up
        dash: Any = _DASHES["dotted" if again else series.style]
        # Full marks hide the gaps of a short dashed line.
        filling = colour if series.style in ("solid", "dots") else "none"
        axes.plot(
            series.x, series.y, color=colour, linestyle=dash or "none", linewidth=1.5, marker=marker, markersize=3,
            markerfacecolor=filling, label=series.label,
        )  # fmt: skip
        if series.band:
            axes.fill_between(series.x, *series.band, alpha=0.18, color=colour, linewidth=0)
        if len(series.errors):
            bars = {"color": colour, "linestyle": "none", "capsize": 2}
            axes.errorbar(series.x, series.y, series.errors, **bars)


def _draw_boxes(axes: Any, series: Series, colour: str, place: int, count: int) -> None:
    """Draw boxes beside those of the other series at the same places."""
    width = 0.8 / count
    shift = (place - (count - 1) / 2) * width
    names = ("med", "q1", "q3", "whislo", "whishi")
    columns = zip(series.y, *series.band, *(series.whiskers or series.band), strict=True)
    boxes = [{**dict(zip(names, values, strict=True)), "fliers": []} for values in columns]
    lines = {"color": colour, "linewidth": 1.2}
    axes.bxp(
        boxes, positions=[x + shift for x in series.x], widths=0.85 * width, showfliers=False, manage_ticks=False,
        patch_artist=True, boxprops={"facecolor": colour, "alpha": 0.35, "edgecolor": colour}, medianprops=lines,
        whiskerprops=lines, capprops=lines,
    )  # fmt: skip
    axes.plot([], [], color=colour, linewidth=6, alpha=0.5, label=series.label)


def _label(axes: Any, panel: Panel, title_width: int = 52) -> None:
    title = "\n".join(textwrap.fill(line, title_width) for line in panel.title.splitlines())
    axes.set_title(title, loc="left")
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    places = {x for series in panel.series for x in series.x}
    if panel.x_scale == "symlog":
        smallest = min((x for x in places if x > 0), default=1.0)
        axes.set_xscale("symlog", linthresh=smallest)
    else:
        axes.set_xscale(panel.x_scale)
    axes.set_yscale(panel.y_scale)
    if panel.x_scale == "linear" and all(float(x).is_integer() for x in places):
        # Layers, seeds and counts have no halves.
        axes.xaxis.get_major_locator().set_params(integer=True)
    if panel.x_scale == "linear" and len(places) == 1:
        axes.set_xticks(list(places))
    if panel.names:
        turned = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
        axes.set_xticks(range(len(panel.names)), panel.names, **turned)


def _finish(axes: Any, panel: Panel) -> None:
    """Add what depends on the range of the values."""
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
    for axis, scale in ((axes.xaxis, panel.x_scale), (axes.yaxis, panel.y_scale)):
        if scale != "linear":
            _label_powers(axis, scale)


def _label_powers(axis: Any, scale: str) -> None:
    """Write numbers at a logarithmic axis as plain text, between the powers of ten too where there
    are few of these."""
    from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

    low, high = sorted(axis.get_view_interval())
    if scale == "symlog":
        # Powers below the smallest value would stand on the zero.
        first = math.ceil(math.log10(axis.get_transform().linthresh) - 1e-9)
        powers = range(first, math.floor(math.log10(high)) + 1)
        axis.set_major_locator(FixedLocator([0, *(10.0**power for power in powers)]))
    elif scale == "log" and high < 3 * low:
        axis.set_major_locator(MaxNLocator(5))
        axis.set_minor_locator(NullLocator())
    elif scale == "log" and high < _FEW_POWERS * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter("")


@contextmanager
def figure_style() -> Iterator[None]:
    """Set matplotlib's parameters for the time of drawing and saving one of our figures."""
    mpl = import_extra("matplotlib", "report", "figures")
    inked = ("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color")
    # Without mathematics, as a dollar sign in a variant's name is a dollar sign.
    absent = ("axes.spines.right", "axes.spines.top", "legend.frameon", "text.parse_math")
    sizes = {"axes.labelsize": 9, "axes.titlesize": 10, "font.size": 9}
    style: Any = {
        **mpl.rcParamsDefault,
        **dict.fromkeys(inked, INK),
        **dict.fromkeys(absent, False),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "svg.fonttype"), "none"),
    }
    style |= {**sizes, "svg.hashsalt": "wellposed", "backend": "agg"}
    with mpl.rc_context(style):
        yield


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of the given size in inches that no window knows about."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def add_grid(axes: Axes) -> None:
    """Draw thin grey lines behind a plot, which dark and light pages both show."""
    axes.grid(visible=True, color="#888888", alpha=0.25, linewidth=0.5)
