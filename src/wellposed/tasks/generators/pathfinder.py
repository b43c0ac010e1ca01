"""Pathfinder images: two long dashed curves, short distractors and two dots.

Curves are drawn so that connectivity can be read off the picture: consecutive dashes of a curve are
one pixel apart, dashes of different curves at least 1.4, and a dot is at least 1.4 pixels away from
every curve but its own. Sizes are those of the Long Range Arena's 32 x 32 release (dash 2, gap 1,
thickness 0.5, dot radius 1.5). The random numbers are those of `random.Random` with a text for a
seed, so an image is the same on every machine whose cosine rounds alike.

The dots must not tell the label. Ends of one curve lie at a typical distance and face each other,
ends of two do not: dots on ends chosen afterwards would give the label away. Here a seed gives two
ways of drawing two long curves, which have the two dots, the dashes at them and a third end in
common, and the label says which of the two is drawn. Curves of
one or two dashes leave no room for that: with them the distance of the dots does tell the label.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from wellposed.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GENERATOR_VERSION = 2
DASH, GAP, THICKNESS, RADIUS = 2.0, 1.0, 0.5, 1.5
SEPARATION = 1.4
MATCHED_LENGTH = 3
_MARGIN = 2.0
_TURNS, _BUDGET = 6, 4
_CURVE_TRIES, _IMAGE_TRIES = 20, 100
_NOTHING = ()


Dash: TypeAlias = tuple[float, float, float, float]
Curve: TypeAlias = tuple[Dash, ...]
Curves: TypeAlias = tuple[Curve, ...]


@dataclass(frozen=True)
class PathfinderRules:
    """What an image holds; lengths in dashes, turns in radians."""

    size: int
    contour_length: int
    distractors: int
    distractor_length: int
    max_turn: float


RULES: Mapping[str, PathfinderRules] = {
    "easy": PathfinderRules(32, 6, 5, 2, 0.6),
    "medium": PathfinderRules(32, 9, 5, 3, 0.7),
    "hard": PathfinderRules(32, 14, 5, 4, 0.8),
}
"""The three levels of the public release."""


@dataclass(frozen=True)
class Drawing:
    """The geometry of an image: dashes as (x, y, x, y), curve by curve, and the two dots."""

    curves: Curves
    dots: tuple[tuple[float, float], tuple[float, float]]
    label: int
    """1 where both dots are on the ends of one curve."""


def draw_image(rules: PathfinderRules, label: int, seed: str) -> Drawing:
    """Return the drawing that the arguments determine; `ConfigError` where it does not fit in 100
    tries."""
    generator = random.Random(f"pathfinder/{GENERATOR_VERSION}/{seed}")
    for _ in range(_IMAGE_TRIES):
        wirings = _wirings(rules, generator)
        short = None if wirings is None else _distractors(rules, wirings[label], generator)
        if wirings is not None and short is not None:
            first, second = wirings[label]
            return Drawing(
                (first, second, *short),
                (first[0][:2], (first[-1] if label else second[-1])[2:]),
                label,
            )
    raise ConfigError(
        f"pathfinder: {rules.distractors} distractors of {rules.distractor_length} dashes and two"
        f" curves of {rules.contour_length} do not fit into {rules.size} x {rules.size} pixels;"
        " lower contour_length or distractors, or raise size or max_turn"
    )


def render(drawing: Drawing, size: int) -> NDArray[np.uint8]:
    """Return the gray image (size, size), 0 to 255: a pixel's value falls from 1 to 0 within a
    pixel of an edge."""
    import numpy as np

    centres = np.arange(size) + 0.5
    x, y = centres[None, :, None], centres[:, None, None]
    dashes = np.array([dash for curve in drawing.curves for dash in curve]).T
    distance = _to_segment(x, y, dashes).min(-1)
    dots = np.array(drawing.dots).T
    to_dots = np.hypot(x - dots[0], y - dots[1]).min(-1)
    shade = np.maximum(THICKNESS / 2 + 0.5 - distance, RADIUS + 0.5 - to_dots)
    return np.rint(255 * np.clip(shade, 0.0, 1.0)).astype(np.uint8)


def _to_segment(x: NDArray[Any], y: NDArray[Any], dashes: NDArray[Any]) -> NDArray[Any]:
    """Return the distance from points to segments (4, ...), broadcast."""
    import numpy as np

    x0, y0, x1, y1 = dashes
    dx, dy = x1 - x0, y1 - y0
    along = ((x - x0) * dx + (y - y0) * dy) / np.maximum(dx * dx + dy * dy, 1e-12)
    along = np.minimum(np.maximum(along, 0.0), 1.0)  # half the time of clip on arrays this small
    return np.hypot(x - x0 - along * dx, y - y0 - along * dy)


def _wirings(rules: PathfinderRules, generator: random.Random) -> tuple[Curves, Curves] | None:
    """Return two long curves that part the dots, and two of which the first joins them; None where
    they do not fit."""
    length = rules.contour_length
    joining = _try(rules, length, _rows(_NOTHING), generator)
    if joining is None:
        return None
    ends = joining[0], joining[-1]
    if length < MATCHED_LENGTH:
        other = _try(rules, length, _rows([joining]), generator)
        return None if other is None else ((joining, other), (joining, other))
    last = _rows([ends[1:]])[[0, -1]]  # the dash, and its far end, which bears a dot
    for _ in range(_CURVE_TRIES):
        leaving = _grow(rules, length, last, generator, first=ends[0])
        other = leaving and _grow(
            rules, length, _rows([joining]), generator, first=_reverse(leaving[-1])
        )
        arriving = (
            leaving
            and other
            and _grow(rules, length, _rows([leaving]), generator, first=_reverse(ends[1]))
        )
        if leaving and other and arriving:
            return (leaving, tuple(_reverse(dash) for dash in reversed(arriving))), (joining, other)
    return None


def _distractors(rules: PathfinderRules, long: Curves, generator: random.Random) -> Curves | None:
    """Return the short curves; tried again by themselves, so that long ones are not chosen by the
    room they leave."""
    import numpy as np

    for _ in range(_CURVE_TRIES):
        drawn, short = _rows(long), []
        for _ in range(rules.distractors):
            curve = _try(rules, rules.distractor_length, drawn, generator, dotted=False)
            if curve is None:
                break
            short.append(curve)
            drawn = np.concatenate((drawn, _rows([curve], dotted=False)))
        else:
            return tuple(short)
    return None


def _rows(curves: Sequence[Curve], *, dotted: bool = True) -> NDArray[Any]:
    """Return what others keep away from, as rows (x, y, x, y, distance); ends that may bear a dot,
    a radius more."""
    import numpy as np

    rows = [(*dash, SEPARATION) for curve in curves for dash in curve]
    if dotted:
        ends = [end for curve in curves for end in (curve[0][:2], curve[-1][2:])]
        rows += [(*end, *end, SEPARATION + RADIUS) for end in ends]
    return np.array(rows).reshape(-1, 5)


def _reverse(dash: Dash) -> Dash:
    return (*dash[2:], *dash[:2])


def _try(
    rules: PathfinderRules,
    length: int,
    drawn: NDArray[Any],
    generator: random.Random,
    *,
    dotted: bool = True,
) -> Curve | None:
    for _ in range(_CURVE_TRIES):
        curve = _grow(rules, length, drawn, generator, dotted=dotted)
        if curve is not None:
            return curve
    return None


def _grow(
    rules: PathfinderRules,
    length: int,
    drawn: NDArray[Any],
    generator: random.Random,
    *,
    first: Dash | None = None,
    dotted: bool = True,
) -> Curve | None:
    """Return a curve that keeps its distance from ``drawn`` and itself, found depth first within a
    budget, or None."""
    import numpy as np

    rows = np.concatenate((drawn, np.empty((length, 5))))
    if first is None:
        low, high = _MARGIN, rules.size - _MARGIN
        start = (
            generator.uniform(low, high),
            generator.uniform(low, high),
            generator.uniform(-math.pi, math.pi),
        )
        choices = [
            _candidates(
                rules, rows[: len(drawn)], start, generator, dotted=dotted, place=0, length=length
            )
        ]
    else:
        clear = _clear(
            np.array([first]), drawn, RADIUS * np.array([dotted, dotted and length == 1])
        ).all()
        choices = [[(first, math.atan2(first[3] - first[1], first[2] - first[0]))] if clear else []]
    for _ in range(_BUDGET * length):
        while choices and not choices[-1]:
            choices.pop()
        if not choices:
            return None
        dash, heading = choices[-1].pop()
        place = len(choices)
        at_end = dotted and place in (1, length)
        rows[len(drawn) + place - 1] = (*dash, SEPARATION + (RADIUS if at_end else 0.0))
        if place == length:
            return tuple(_as_dash(row) for row in rows[len(drawn) :])
        # the dash just drawn is a gap away, which is less than what others keep
        before = rows[: len(drawn) + place - 1]
        state = (dash[2], dash[3], heading)
        choices.append(
            _candidates(rules, before, state, generator, dotted=dotted, place=place, length=length)
        )
    return None


def _candidates(
    rules: PathfinderRules,
    others: NDArray[Any],
    state: tuple[float, float, float],
    generator: random.Random,
    *,
    dotted: bool,
    place: int,
    length: int,
) -> list[tuple[Dash, float]]:
    """Return dashes and their headings that can stand at ``place`` of a curve whose end and heading
    are ``state``."""
    import numpy as np

    x, y, heading = state
    turn = rules.max_turn if place else 0.0
    headings = np.array(
        [heading + generator.uniform(-turn, turn) for _ in range(_TURNS if place else 1)]
    )
    step = np.stack((np.cos(headings), np.sin(headings)), -1)
    start = np.array((x, y)) + (GAP if place else 0.0) * step
    dashes = np.concatenate((start, start + DASH * step), -1)
    low, high = _MARGIN, rules.size - _MARGIN
    ok = ((dashes >= low) & (dashes <= high)).all(-1)
    dashes, headings = dashes[ok], headings[ok]
    if not len(dashes):
        return []
    more = RADIUS * np.array([dotted and place == 0, dotted and place == length - 1])
    ok = _clear(dashes, others, more)
    return [
        (_as_dash(dash), float(angle)) for dash, angle in zip(dashes[ok], headings[ok], strict=True)
    ]


def _as_dash(row: NDArray[Any]) -> Dash:
    return float(row[0]), float(row[1]), float(row[2]), float(row[3])


def _clear(dashes: NDArray[Any], others: NDArray[Any], more: NDArray[Any]) -> NDArray[Any]:
    """Return which dashes keep their distance from rows (x, y, x, y, distance), their ends ``more``
    of it."""
    ends, tips = dashes.reshape(-1, 2, 1, 2), others[:, :4].reshape(1, 1, -1, 2, 2)
    near = (
        _to_segment(ends[..., 0], ends[..., 1], others.T[:4]) >= others[:, 4] + more[None, :, None]
    )
    back = (
        _to_segment(tips[..., 0], tips[..., 1], dashes.T[:, :, None, None, None])
        >= others[:, 4, None]
    )
    return (near.all((-1, -2)) & back.all((-1, -2, -3))).reshape(-1)
