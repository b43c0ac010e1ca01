"""Charts of a page: SVG that stretches with it, and text beside the SVG that keeps its size.

Places are whole numbers from 0 to `SIDE`, from the left and from the top of a plot, or percent of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from wellposed.charts import Panel, Series
from wellposed.measurement.figures import HeatMap, short_number, short_role
from wellposed.text_table import format_number

SIDE = 1000
POINTS = 400
"""Points of a curve that are drawn and spoken."""
LABEL = 6.0
"""Height of the name at the end of a curve, in percent of the plot."""
SQUASHED = 3.0
"""How many times the room of the others a series must take for the axis to be cut off below it."""
LOGARITHMIC = 20.0
"""Largest over smallest value from which an axis is logarithmic."""
WIDEST = 3.0
"""Longest interval that is drawn whole, as a multiple of the median."""
CROWDED = 14
"""Characters that the axis of a forest plot has room for."""
HUGE = 1e250
"""Largest value that an axis reaches; twice the room of it is still a number."""
LEVELS = 9
"""Colours of a map; the page's style names them h0, h1, ..."""
CLOSE = 1.02
"""Largest over smallest value up to which all have one colour."""
TINY = 1e-300
DECADES = 1e-4
"""Smallest value of a logarithmic axis, as a share of the largest."""


class Axis:
    """Values to places between 0 and 1."""

    def __init__(self, scale: str, low: float, high: float, threshold: float = 1.0) -> None:
        self.scale, self.threshold = scale, threshold
        self.low, self.high, self.ends = self._of(low), self._of(high), (low, high)

    def _of(self, value: float) -> float:
        if self.scale == "symlog":
            share = value / self.threshold
            return share if share <= 1 else 1 + math.log10(share)
        return value if self.scale == "linear" else math.log10(max(value, TINY))

    def place(self, value: float) -> float:
        """Return where a value stands; beyond the ends at most a plot away."""
        share = (self._of(value) - self.low) / ((self.high - self.low) or 1.0)
        return max(-1.0, min(2.0, share))

    def ticks(self, most: int = 5) -> list[tuple[float, str]]:
        """Return the places of some round numbers in percent, and the numbers."""
        from matplotlib.ticker import LogLocator, MaxNLocator

        low, high = self.ends
        values: Sequence[float] = MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
        if self.scale != "linear" and low < high:
            start = self.threshold if self.scale == "symlog" else low
            few = (1, 2, 5) if high < 50 * start else (1,)
            values = LogLocator(subs=few, numticks=most).tick_values(start, high)
            values = [0.0, *values] if self.scale == "symlog" else values
        if self.scale == "log" and high < LOGARITHMIC / 10 * low:
            values = MaxNLocator(most).tick_values(low, high)
        inside = [v for v in values if -1e-9 <= self.place(v) <= 1 + 1e-9]
        return [(round(100 * self.place(v), 2), f"{float(v):.6g}") for v in inside]


def fitted(panels: Sequence[Panel]) -> list[tuple[Panel, str]]:
    """Return panels with limits that no series squashes the others in, one for all of one y-label,
    and what leaves them. A panel that has limits keeps them.

    The axis is logarithmic where values are positive and far apart. Where leaving a series out, of
    three or more and at most a third of them, leaves the others three times the room, the axis ends
    where theirs do; the first tenth of the steps may begin above it.
    """
    labels = dict.fromkeys(panel.y_label for panel in panels)
    axes = {label: _limits([p for p in panels if p.y_label == label]) for label in labels}
    found = []
    for panel in panels:
        scale, limits, left = axes[panel.y_label]
        names = dict.fromkeys(each.label for each in panel.series if each.label in left)
        out = ", ".join(f"{name} (up to {format_number(left[name], 3)})" for name in names)
        note = f"Beyond the chart: {out}." if out else ""
        drawn = replace(panel, y_scale=scale, y_limits=limits)
        found.append((drawn, note) if panel.y_limits is None else (panel, ""))
    return found


def _limits(panels: Sequence[Panel]) -> tuple[Any, tuple[float, float], dict[str, float]]:
    spans: dict[str, list[float]] = {}
    for each, label in ((line, of.x_label) for of in panels for line in of.series):
        # The fall of the first steps would squash all that comes after it.
        start = len(each.y) // 10 if label else 0
        for line in (each.y, *each.band):
            values = [min(line), *line[start:]]
            spans.setdefault(each.label, []).extend(max(-HUGE, min(HUGE, v)) for v in values)
    levels = [panel.level[1] for panel in panels if panel.level]
    every = [*levels, *(value for values in spans.values() for value in values)] or [0.0]
    logarithmic = min(every) > 0 and max(every) > LOGARITHMIC * min(every)
    of = math.log10 if logarithmic else float
    ends = {label: (of(min(values)), of(max(values))) for label, values in spans.items()}
    kept = dict(ends)
    while len(kept) > max(2, 2 * len(ends) / 3):
        rooms = {out: _room(end for name, end in kept.items() if name != out) for out in kept}
        out = min(rooms, key=lambda label: rooms[label])
        if rooms[out] * SQUASHED > _room(kept.values()):
            break
        del kept[out]
    shown = [end for pair in kept.values() for end in pair] or [0.0]
    if len(kept) == len(ends):
        shown += map(of, levels)
    low, high = min(shown), max(shown)
    if logarithmic:
        low = max(low, high + math.log10(DECADES))
    margin = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    left = {label: max(spans[label]) for label in ends if label not in kept}
    if logarithmic:
        return "log", (10 ** (low - margin), 10 ** (high + margin)), left
    return "linear", (low - margin, high + margin), left


def _room(ends: Iterable[tuple[float, float]]) -> float:
    lows, highs = zip(*ends, strict=True)
    return max(highs) - min(lows)


def chart(panel: Panel, note: str = "", *, quiet: bool = False) -> dict[str, Any]:
    """Return a panel as the template draws it; a series' colour is the number of its variant.

    ``quiet`` leaves out the names at the ends of curves, and the values under the pointer.
    """
    places = sorted({x for series in panel.series for x in series.x}) or [0.0]
    smallest = min((x for x in places if x > 0), default=1.0)
    low = places[0] if len(places) > 1 else places[0] - 1
    x_axis = Axis(panel.x_scale, low, places[-1], smallest)
    limits = panel.y_limits or (0.0, 1.0)
    y_axis = Axis(panel.y_scale, *limits)
    up = lambda value: 1 - y_axis.place(value)  # noqa: E731
    marks, ends = [], []
    after = sum(each.style != "dashed" for each in panel.series)
    for index, each in enumerate(panel.series):
        picks, sides = _picks(each.y), zip(each.band, (1, -1), strict=False)
        line = [(each.x[k], each.y[k]) for k in picks]
        band = [(each.x[k], side[k]) for side, way in sides for k in picks[::way]]
        style = "before" if each.style == "dashed" else "after"
        pale = quiet and style == "after" and after > 1
        shade = 0.25 + 0.75 * index / (after - 1) if pale else 1.0
        drawn = [
            " ".join(f"{SIDE * x_axis.place(x):.0f},{SIDE * up(y):.0f}" for x, y in points)
            for points in (line, band)
        ]
        marks.append((each.colour or 0, style, shade, *drawn))
        if not quiet and line:
            ends.append((100 * up(line[-1][1]), each.colour or 0, each.label))
    return {
        "title": panel.title,
        "names": "; ".join(series.label for series in panel.series),
        "x_label": panel.x_label,
        "x_ticks": x_axis.ticks(),
        "y_ticks": [(round(100 - place, 2), text) for place, text in y_axis.ticks()],
        "marks": marks,
        "ends": _apart(ends) if LABEL * len(ends) < 100 else [],
        "level": panel.level and (panel.level[0], round(100 * up(panel.level[1]), 2)),
        "note": note,
        "hover": "" if quiet else json.dumps(_hover(panel, places, x_axis), separators=(",", ":")),
    }


def _picks(values: Sequence[float]) -> Sequence[int]:
    """Return the places of first, last, least and greatest value of as many stretches as are drawn."""
    step = -(-len(values) * 2 // POINTS)
    if step < 3:
        return range(len(values))
    found = {0, len(values) - 1}
    for start in range(0, len(values), step):
        stretch = range(start, min(start + step, len(values)))
        found |= {of(stretch, key=lambda k: values[k]) for of in (min, max)}
    return sorted(found)


def _apart(ends: Sequence[tuple[float, int, str]]) -> list[tuple[float, int, str]]:
    """Return names of curves moved up or down until none stands on another."""
    ordered = sorted(ends)
    places = [max(0.0, min(100.0, place)) for place, *_ in ordered]
    for k in range(1, len(places)):
        places[k] = max(places[k], places[k - 1] + LABEL)
    for k in reversed(range(len(places))):
        below = places[k + 1] - LABEL if k + 1 < len(places) else 100.0
        places[k] = min(places[k], below)
    return [(round(at, 2), *end[1:]) for at, end in zip(places, ordered, strict=True)]


def _hover(panel: Panel, places: Sequence[float], axis: Axis) -> dict[str, Any]:
    """Return, for every x that has a value, its place in the plot and what each series says there."""
    if len(places) > POINTS:
        places = [places[round(i * (len(places) - 1) / (POINTS - 1))] for i in range(POINTS)]
    said = [_said(series) for series in panel.series]
    points = []
    for x in places:
        told = f"{panel.x_label}: {x:.4g}", [each.get(x, "") for each in said]
        points.append([round(SIDE * axis.place(x), 1), *told])
    return {"series": [[each.colour or 0, each.label] for each in panel.series], "points": points}


def _said(series: Series) -> dict[float, str]:
    values = [format_number(float(y)) for y in series.y]
    if series.band:
        ends = [[format_number(float(end)) for end in side] for side in series.band]
        values = [f"{value} ({a} to {b})" for value, a, b in zip(values, *ends, strict=True)]
    return dict(zip(series.x, values, strict=True))


def forest(
    title: str, rows: Sequence[tuple[Any, ...]], tests: Sequence[Any]
) -> dict[str, Any] | None:
    """Return the plot of ``rows``, (variant, number, mean, sentence, bad), with the test of each;
    None where no difference is known and nothing is said."""
    middles = [test.mean_difference for test in tests if test and test.mean_difference is not None]
    intervals = [test.interval for test in tests if test and test.interval]
    if not middles and not any(said for *_, said, _ in rows):
        return None
    # Two seeds have intervals of twelve standard errors: one of them would squash all others.
    ends = sorted(max(map(abs, pair)) for pair in intervals) or [math.inf]
    reach = max(WIDEST * ends[len(ends) // 2], *map(abs, [0.0, *middles]))
    known = [0.0, *middles, *(max(-reach, min(reach, end)) for ends in intervals for end in ends)]
    margin = 0.05 * (max(known) - min(known)) or 1.0
    axis = Axis("linear", min(known) - margin, max(known) + margin)
    place = lambda value: round(100 * min(1.0, max(0.0, axis.place(value))), 2)  # noqa: E731
    bars = []
    for row, test in zip(rows, tests, strict=True):
        ends = None
        if test and test.mean_difference is not None:
            low, high = test.interval or (test.mean_difference,) * 2
            ends = place(low), place(test.mean_difference), place(high)
        bars.append((*row, ends, bool(test and test.significant)))
    ticks = axis.ticks(3) if middles else []
    if sum(len(text) for _, text in ticks) > CROWDED:
        ticks = ticks[::2]
    better = "right" if any(test and test.higher_is_better for test in tests) else "left"
    return {"title": title, "better": better, "zero": place(0.0), "ticks": ticks, "bars": bars}


def level_bounds(values: Iterable[float]) -> list[float]:
    """Return the value of each colour: half way, in logarithms, from even steps to as many values
    near each, which tells apart what lies close together beside what lies far off.

    >>> [short_number(bound) for bound in level_bounds([0.4, 0.45, 0.45, 0.7, 0.7, 0.7, 0.8])]
    ['0.40', '0.44', '0.46', '0.48', '0.63', '0.66', '0.69', '0.72', '0.80']
    """
    ordered = sorted(max(value, TINY) for value in values)
    if not ordered or ordered[-1] < CLOSE * ordered[0]:
        return ordered[:1]
    low, high = ordered[0], ordered[-1]
    shares = [k / (LEVELS - 1) for k in range(LEVELS)]
    quantiles = [ordered[round(share * (len(ordered) - 1))] for share in shares]
    even = [low * (high / low) ** share for share in shares]
    return [math.sqrt(of) * math.sqrt(step) for of, step in zip(quantiles, even, strict=True)]


def level_style(value: float, bounds: Sequence[float]) -> str:
    """Return the class of the colour of a value: that of the bound it is nearest to."""
    if not math.isfinite(value):
        return "h-bad"
    logs = [math.log(max(each, TINY)) for each in bounds]
    of = math.log(max(value, TINY))
    place = min(range(len(logs)), key=lambda k: abs(logs[k] - of))
    return f"h{round(place * (LEVELS - 1) / max(1, len(bounds) - 1))}"


def role_map(name: str, heat: HeatMap, bounds: Sequence[float]) -> dict[str, Any]:
    """Return a heat map with a row for each role: the style and the text of each cell."""
    rows = []
    for role, column in zip(heat.roles, zip(*heat.values, strict=True), strict=True):
        known = [(k, v) for k, v in enumerate(column) if v is not None]
        said = [(k, v, f"{heat.layers[k]} {role}: {short_number(v)}") for k, v in known]
        rows.append((short_role(role), [(k, level_style(v, bounds), text) for k, v, text in said]))
    return {"name": name, "layers": len(heat.layers), "rows": rows}
