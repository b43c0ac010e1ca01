"""Charts by matplotlib (lines, points, bars, boxes) as SVG. Free of torch and of global state."""

from __future__ import annotations

import io
import math
import re
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from wellposed.measurement import figure_style, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0d64be", "#dc785f", "#165800", "#942a72", "#846d1c", "#a679fd", "#2a9fab", "#322c2e")
"""Colours that can be distinguished with any kind of colour vision."""
GREY = "#8a8a8a"
LOGARITHMIC = 20.0
"""Ratio of the largest to the smallest value above which an axis is logarithmic."""
MOST_LOGARITHMIC = 1e100
"""Ratio above which powers of ten give no ticks."""
HUGE = 1e250
"""Largest value that is drawn; its double is still finite."""

_FEW_POWERS = 50
_SAME = 0.004
"""Curves are drawn as one if they are nowhere further apart than this fraction of the panel."""
_DASH = 5.0
"""Length of a dash of coinciding curves, in widths of the line."""
_LINE = 0.17
"""Height of a legend line in inches."""
_LEGEND: dict[str, Any] = {"fontsize": 8, "handlelength": 2.4}
Row = Mapping[str, Any]
Style = Literal["solid", "dashed", "dotted", "dots", "rings", "bars"]
_DASHES = {"solid": "-", "dashed": (0, (5, 1.5)), "dotted": (0, (1, 1.2))}


@dataclass(frozen=True)
class Series:
    """One line, cloud of points, or row of bars of a panel."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: Style = "solid"
    colour: int | None = None
    """Number in the palette (default: the position in the panel)."""
    errors: Sequence[float] = ()
    """Half lengths of the error bars, one per point, if any."""
    band: tuple[Sequence[float], Sequence[float]] | tuple[()] = ()
    """Lower and upper ends of a shaded range, one per point."""


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
    """Labels at x = 0, 1, ... in place of numbers."""
    y_limits: tuple[float, float] | None = None
    level: tuple[str, float] | None = None
    """Name and height of a thin line across the panel."""


def where(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """Return the rows whose columns have the wanted values.

    >>> where([{"layer": 1, "loss": 0.5}, {"layer": 2, "loss": 0.4}], layer=2)
    [{'layer': 2, 'loss': 0.4}]
    """
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def lines(
    rows: Sequence[Row], x: str, y: str, *, by: str | Callable[[Row], str], style: Style = "solid"
) -> list[Series]:
    """Return a series of column ``y`` over ``x`` for each value of ``by``, in order of occurrence.

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
    """Return the `lines` of medians over rows with the same ``x``, shaded from smallest to largest.

    >>> rows = [{"model": "a", "layer": 1, "loss": value} for value in (0.5, 0.4, 0.9)]
    >>> [(line.x, line.y, line.band) for line in medians(rows, "layer", "loss", by="model")]
    [([1], [0.5], ([0.4], [0.9]))]
    """
    centres = []
    for line in lines(rows, x, y, by=by, style=style):
        values: dict[float, list[float]] = {}
        for at, value in zip(line.x, line.y, strict=True):
            values.setdefault(at, []).append(value)
        middle, *band = (
            list(map(statistic, values.values())) for statistic in (statistics.median, min, max)
        )
        centres.append(replace(line, x=list(values), y=middle, band=tuple(band)))
    return centres


def coinciding(panel: Panel) -> list[list[int]]:
    """Return groups of two or more series of a panel that would hide each other, by number.

    >>> one, two, three = (Series(name, [1, 2], [1, y]) for name, y in zip("abc", (2, 2, 3)))
    >>> coinciding(Panel("p", "x", "y", [one, two, three]))
    [[0, 1]]
    """
    finite = [y for series in panel.series for y in series.y if math.isfinite(y)]
    near = _SAME * (max(finite) - min(finite)) if finite else 0.0
    groups: list[list[int]] = []
    for number, series in enumerate(panel.series):
        if series.style == "bars" or not len(series.x):
            continue
        for group in groups:
            if _are_same(panel.series[group[0]], series, near):
                group.append(number)
                break
        else:
            groups.append([number])

    return [group for group in groups if len(group) > 1]


def coinciding_note(panel: Panel) -> str:
    """Return a sentence that names the curves of a panel that coincide; empty if none do."""
    names = [[panel.series[number].label for number in group] for group in coinciding(panel)]
    return "; ".join(
        f"{', '.join(group[:-1])} and {group[-1]} coincide" for group in names if len({*group}) > 1
    )


def _are_same(one: Series, other: Series, near: float) -> bool:
    if list(one.x) != list(other.x):
        return False
    pairs = zip(one.y, other.y, strict=True)
    return all(a == b or abs(a - b) <= near or (math.isnan(a) and math.isnan(b)) for a, b in pairs)


def draw(panels: Sequence[Panel], path: Path, *, columns: int | None = None) -> None:
    """Write ``panels`` side by side as an SVG file without a date, by default four to a row, or
    three if that fills the rows. Panels with the same label and scale of an axis share it."""
    with figure_style():
        # White, as the page's colour is unknown. Tight, as a legend may exceed the layout.
        settings: Any = {"format": "svg", "facecolor": "white", "bbox_inches": "tight"}
        undated: Any = {"Date": None, "Creator": None}
        figure_of(panels, columns=columns).savefig(path, metadata=undated, **settings)


def embedded(drawing: Callable[[], Figure], name: str, label: str) -> str:
    """Return a figure, made by one call of ``drawing``, as an SVG element of a page. Its
    ids on the page begin with ``name``; ``label`` describes it for those who cannot see it."""
    out = io.StringIO()
    with figure_style():
        bare: Any = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        drawing().savefig(out, format="svg", metadata=bare)
    text = out.getvalue()
    unwanted = r"<defs>\s*<style.*?</style>\s*</defs>|<!--.*?-->"
    text = re.sub(unwanted, "", text[text.index("<svg ") :], flags=re.DOTALL)
    text = re.sub(r'\b(id="|xlink:href="#|url\(#)', rf"\g<1>{name}-", text)
    named = f'<svg role="img" aria-label="{escape(label)}" '
    return text.replace("<svg ", named, 1)


def fitted(panels: Sequence[Panel]) -> list[Panel]:
    """Return panels with finite values. Panels of one y-label share their limits, and a logarithmic
    axis if the values are positive and far apart. A panel with limits keeps its axis."""
    bounded = lambda values: [max(-HUGE, min(HUGE, value)) for value in values]  # noqa: E731
    drawn = []
    every = dict[str, list[float]]()
    for panel in panels:
        series = [
            replace(line, y=bounded(line.y), band=tuple(map(bounded, line.band)))
            for line in panel.series
        ]
        drawn.append(replace(panel, series=series))
        values = every.setdefault(panel.y_label, [])
        values += chain(*((*line.y, *chain(*line.band)) for line in series))
        values += panel.level[1:] if panel.level else ()

    axes = {label: _axis(values) for label, values in every.items() if values}
    return [
        replace(panel, **axes.get(panel.y_label, {})) if panel.y_limits is None else panel
        for panel in drawn
    ]


def _axis(values: Sequence[float]) -> dict[str, Any]:
    """Return scale and limits of the y-axis for values, with a margin of 5 %."""
    low = min(values)
    high = max(values)
    if low > 0 and LOGARITHMIC < high / low < MOST_LOGARITHMIC:
        margin = (high / low) ** 0.05
        return {"y_scale": "log", "y_limits": (low / margin, high * margin)}
    margin = 0.05 * (high - low) or abs(high) or 1.0
    return {"y_limits": (low - margin, high + margin)}


def figure_of(
    panels: Sequence[Panel], *, columns: int | None = None, size: tuple[float, float] = (3.4, 3.1)
) -> Figure:
    """Return a figure of panels, each of ``size`` in inches, or wider if a legend needs it; call it
    within `figure_style`."""
    wide = 3 if len(panels) % 4 and len(panels) % 3 == 0 else 4
    columns = min(columns or wide, len(panels))
    looks = [_looks(panel) for panel in panels]
    is_shared = len({pair for look in looks for pair in look.items()}) == len({*chain(*looks)})
    every = (series.label for panel in panels if panel.legend for series in panel.series)
    labels = dict.fromkeys(label for label in every if not label.startswith("_"))
    rows = -(-len(panels) // columns)
    width = max(size[0], 4.6 / columns if labels else 0.0)
    across = max(1, int(width * columns / (0.55 + 0.065 * max(map(len, labels), default=0))))
    legend = -(-len(labels) // across) if is_shared else rows * max(map(len, looks))
    figure = new_figure(width * columns, size[1] * rows + _LINE * legend, "constrained")
    first: dict[Any, Any] = {}
    handles: dict[str, Any] = {}
    for number, panel in enumerate(panels, start=1):
        x = ("x", panel.x_label, panel.x_scale) if panel.x_label and not panel.names else None
        y = ("y", panel.y_label, panel.y_scale) if panel.y_label else None
        # Panels of the same labels and scales share their axes.
        shares = {"sharex": first.get(x), "sharey": first.get(y)}
        axes: Any = figure.add_subplot(rows, columns, number, **shares)
        first = {x: axes, y: axes, **first, None: None}
        _draw_series(axes, panel)
        axes.set_title("\n".join(textwrap.wrap(panel.title, int(13 * width))), loc="left")
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label)
        _scale(axes, panel)
        drawn, named = axes.get_legend_handles_labels()
        mine = dict(zip(reversed(named), reversed(drawn), strict=True)) if panel.legend else {}
        mine = {label: mine[label] for label in labels if label in mine}
        handles = {**mine, **handles}
        if mine and not is_shared:
            at = {"loc": "upper left", "bbox_to_anchor": (0, -0.3)}
            axes.legend(mine.values(), mine.keys(), **at, **_LEGEND)

    for axes, panel in zip(figure.axes, panels, strict=True):
        _finish(axes, panel)
    if is_shared and handles:
        visible = [label for label in labels if label in handles]
        at = {"loc": "outside lower left", "ncols": across}
        figure.legend([handles[label] for label in visible], visible, **at, **_LEGEND)

    return figure


def _looks(panel: Panel) -> dict[str, tuple[str, int]]:
    """Return the look of the first series of each label."""
    numbered = reversed([*enumerate(panel.series)])
    return {s.label: (s.style, n if s.colour is None else s.colour) for n, s in numbered}


def _draw_series(axes: Any, panel: Panel) -> None:
    turns = {
        number: (turn, len(group))
        for group in coinciding(panel)
        for turn, number in enumerate(group)
    }
    for index, series in enumerate(panel.series):
        turn, count = turns.get(index, (0, 1))
        number = index if series.colour is None else series.colour
        colour = COLOURS[number % len(COLOURS)]
        if series.style == "bars":
            width = (series.x[1] - series.x[0]) if len(series.x) > 1 else 1.0
            axes.bar(series.x, series.y, width=width, color=colour, alpha=0.5, label=series.label)
            continue
        marker = "o" if len(series.x) <= 40 else None
        is_mark = len(series.x) == 1 and series.style in ("dots", "rings")
        again = number >= len(COLOURS) and series.style == "solid"  # the colours are used up
        dash: Any = _DASHES.get("dotted" if again else series.style, "none")
        if count > 1 and dash != "none":
            # One dash of each colour in turn, so that none hides another.
            dash = (-_DASH * turn, (_DASH, _DASH * (count - 1)))
        # Filled marks hide the gaps of a short dashed line.
        filling = colour if series.style in ("solid", "dots") else "none"
        axes.plot(
            series.x, series.y, color=colour, linestyle=dash, linewidth=1.5, marker=marker,
            markersize=(7 if is_mark else 3) + 3 * turn, markeredgewidth=1.2,
            markerfacecolor="none" if turn else filling, label=series.label,
        )  # fmt: skip
        if series.band:
            shade = {"alpha": 0.18, "color": colour, "linewidth": 0}
            axes.fill_between(series.x, *series.band, **shade)
        if len(series.errors):
            bars = {"color": colour, "linestyle": "none", "capsize": 2}
            axes.errorbar(series.x, series.y, series.errors, **bars)


def _scale(axes: Any, panel: Panel) -> None:
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
    """Add elements that depend on the range of the values."""
    # Thin grey lines, which dark and light pages both show.
    axes.grid(visible=True, color="#888888", alpha=0.25, linewidth=0.5)
    if panel.level is not None:
        name, height = panel.level
        axes.axhline(height, color=GREY, linewidth=1, linestyle=(0, (2, 2)))
        axes.annotate(
            name, (1, height), xycoords=("axes fraction", "data"), xytext=(3, 0), textcoords="offset points",
            ha="left", va="center", fontsize=8, annotation_clip=False,
        )  # fmt: skip

    if panel.y_limits is not None:
        axes.set_ylim(*panel.y_limits)
    for axis, scale in ((axes.xaxis, panel.x_scale), (axes.yaxis, panel.y_scale)):
        if scale != "linear":
            _label_powers(axis, scale)


def _label_powers(axis: Any, scale: str) -> None:
    """Label a logarithmic axis with plain numbers, also between powers of ten if few."""
    from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

    low, high = sorted(axis.get_view_interval())
    if scale == "symlog":
        # Powers below the smallest value would overlap with zero.
        first = math.ceil(math.log10(axis.get_transform().linthresh) - 1e-9)
        powers = range(first, math.floor(math.log10(high)) + 1)
        axis.set_major_locator(FixedLocator([0, *(10.0**power for power in powers)]))
    elif high < 3 * low:
        axis.set_major_locator(MaxNLocator(5))
    elif high < _FEW_POWERS * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())
