"""Pathfinder images: two long dashed curves, short distractors and two dots; the label is known from the drawing.

Curves are drawn so that connectivity can be read off the picture: consecutive dashes of a curve are one pixel apart,
dashes of different curves at least 1.4, and a dot is at least 1.4 pixels away from every curve but its own. Sizes are
those of the Long Range Arena's 32 x 32 release (dash 2, gap 1, thickness 0.5, dot radius 1.5). The random numbers are
those of `random.Random` with a text for a seed, so an image is the same on every machine whose cosine rounds alike.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from wellposed.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GENERATOR_VERSION = 1
DASH, GAP, THICKNESS, RADIUS = 2.0, 1.0, 0.5, 1.5
SEPARATION = 1.4
_MARGIN = 2.0
_TURNS, _BUDGET = 6, 4
_CURVE_TRIES, _IMAGE_TRIES = 20, 100


Dash: TypeAlias = tuple[float, float, float, float]


@dataclass(frozen=True)
class PathfinderRules:
    """What an image holds; lengths in dashes, turns in radians."""

    size: int
    contour_length: int
    distractors: int
    distractor_length: int
    max_turn: float


@dataclass(frozen=True)
class Drawing:
    """The geometry of an image: dashes as (x, y, x, y), curve by curve, and the two dots."""

    curves: tuple[tuple[Dash, ...], ...]
    dots: tuple[tuple[float, float], tuple[float, float]]
    label: int
    """1 where both dots are on the ends of one curve."""


def draw_image(rules: PathfinderRules, label: int, seed: str) -> Drawing:
    """Return the drawing that ``(rules, label, seed)`` determines.

    Raises:
        ConfigError: the curves did not fit in 100 tries.
    """
    generator = random.Random(f"pathfinder/{GENERATOR_VERSION}/{seed}")
    for _ in range(_IMAGE_TRIES):
        curves = _curves(rules, generator)
        if curves is not None:
            return Drawing(tuple(curves), _dots(curves, label, generator), label)
    raise ConfigError(
        f"pathfinder: {rules.distractors} distractors of {rules.distractor_length} dashes and two curves of "
        f"{rules.contour_length} do not fit into {rules.size} x {rules.size} pixels; lower contour_length or "
        "distractors, or raise size or max_turn"
    )


def render(drawing: Drawing, size: int) -> NDArray[np.uint8]:
    """Return the gray image (size, size), 0 to 255: a pixel's value falls from 1 to 0 within a pixel of an edge."""
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
    along = np.clip(((x - x0) * dx + (y - y0) * dy) / np.maximum(dx * dx + dy * dy, 1e-12), 0.0, 1.0)
    return np.hypot(x - x0 - along * dx, y - y0 - along * dy)


def _dots(
    curves: Sequence[Sequence[Dash]], label: int, generator: random.Random
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Choose the marked ends: both of one long curve, or one of each."""
    ends = [(curve[0][:2], curve[-1][2:]) for curve in curves[:2]]
    if label:
        return ends[generator.randrange(2)]
    return ends[0][generator.randrange(2)], ends[1][generator.randrange(2)]


def _curves(rules: PathfinderRules, generator: random.Random) -> list[tuple[Dash, ...]] | None:
    import numpy as np

    drawn = np.empty((0, 5))
    curves = []
    lengths = [rules.contour_length] * 2 + [rules.distractor_length] * rules.distractors
    for number, length in enumerate(lengths):
        for _ in range(_CURVE_TRIES):
            curve = _grow(rules, length, drawn, generator, dotted=number < 2)
            if curve is not None:
                break
        else:
            return None
        curves.append(curve)
        rows = [(*dash, SEPARATION) for dash in curve]
        if number < 2:
            # a dot is a dash of length zero that others keep a radius more from
            rows += [(*end, *end, SEPARATION + RADIUS) for end in (curve[0][:2], curve[-1][2:])]
        drawn = np.concatenate((drawn, np.array(rows)))
    return curves


def _grow(
    rules: PathfinderRules, length: int, drawn: NDArray[Any], generator: random.Random, *, dotted: bool
) -> tuple[Dash, ...] | None:
    """Return a curve of ``length`` dashes that keeps its distance from ``drawn`` and from itself, or None.

    Depth first: where no turn is left, the last dash is taken back, for as long as the budget lasts.
    """
    import numpy as np

    rows = np.concatenate((drawn, np.empty((length, 5))))
    low, high = _MARGIN, rules.size - _MARGIN
    start = (generator.uniform(low, high), generator.uniform(low, high), generator.uniform(-math.pi, math.pi))
    choices = [_candidates(rules, rows[: len(drawn)], start, generator, dotted=dotted, place=0, length=length)]
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
        choices.append(_candidates(rules, before, state, generator, dotted=dotted, place=place, length=length))
    return None


def _candidates(
    rules: PathfinderRules, others: NDArray[Any], state: tuple[float, float, float], generator: random.Random,
    *, dotted: bool, place: int, length: int,
) -> list[tuple[Dash, float]]:  # fmt: skip
    """Return dashes and their headings that can stand at ``place`` of a curve whose end and heading are ``state``."""
    import numpy as np

    x, y, heading = state
    turn = rules.max_turn if place else 0.0
    headings = np.array([heading + generator.uniform(-turn, turn) for _ in range(_TURNS if place else 1)])
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
    return [(_as_dash(dash), float(angle)) for dash, angle in zip(dashes[ok], headings[ok], strict=True)]


def _as_dash(row: NDArray[Any]) -> Dash:
    return float(row[0]), float(row[1]), float(row[2]), float(row[3])


def _clear(dashes: NDArray[Any], others: NDArray[Any], more: NDArray[Any]) -> NDArray[Any]:
    """Return which dashes (number, 4) keep their distance from rows (x, y, x, y, distance), their ends ``more`` of it.

    Two segments that do not cross are as far apart as an end of one and the other; they cannot cross where ends keep
    more than half a dash.
    """
    ends, tips = dashes.reshape(-1, 2, 1, 2), others[:, :4].reshape(1, 1, -1, 2, 2)
    near = _to_segment(ends[..., 0], ends[..., 1], others.T[:4]) >= others[:, 4] + more[None, :, None]
    back = _to_segment(tips[..., 0], tips[..., 1], dashes.T[:, :, None, None, None]) >= others[:, 4, None]
    return (near.all((-1, -2)) & back.all((-1, -2, -3))).reshape(-1)
