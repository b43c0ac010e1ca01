"""The polynomial that pulls singular values above a bound down to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial

from torch import Tensor

from wellposed.linalg._norms import PIECE, product, rounded_sums, symmetric_product
from wellposed.linalg._rungs import Grams, chosen, grams_of, put_, selected, sizes_of, unit_of
from wellposed.linalg._tensors import Workspace


def bent_inside(  # noqa: PLR0917
    point: Tensor,
    grams: Grams,
    lengths: Sequence[Sequence[float]],
    depth: Tensor,
    goal: float,
    work: Workspace,
) -> tuple[Tensor, list[float]]:
    """Return ``X (I - b G^2 - a G^4)``, repeated until ``|X|_2 <= goal``, and the proved norms."""
    sizes = grams.size
    if len(lengths) > 1:  # the largest size serves all, so few distinct numbers are needed
        sizes = [max(sizes)] * len(sizes)

    rounding = [grams.rounding * size * size for size in sizes]
    strength = partial(_strengths, columns=point.shape[-1], unit=unit_of(point.dtype), goal=goal)
    rows = [list(map(strength, rounding, row, sizes)) for row in lengths]
    fifth, ninth, reached = ([[three[part] for three in row] for row in rows] for part in range(3))
    square = grams.gram.to(point)
    square = symmetric_product(square, square)
    bend = symmetric_product(square, square).mul_(chosen(ninth, depth, point.dtype)[:, None, None])
    if any(map(any, fifth)):
        bend.addcmul_(square, chosen(fifth, depth, point.dtype)[:, None, None])

    bent = product(point, bend, plus=point, alpha=-1.0)
    again = [
        index
        for index in range(len(point))
        if any(
            goal < new[index] <= 0.9 * old[index] for new, old in zip(reached, lengths, strict=True)
        )
    ]
    largest = [max(row[index] for row in reached) for index in range(len(point))]
    if again:
        part = selected(bent, again)
        rows_again = [[row[index] for index in again] for row in reached]
        grams = grams_of(part, *sizes_of(part, work))
        part, proved = bent_inside(part, grams, rows_again, selected(depth, again), goal, work)
        put_(bent, again, part)
        for index, length in zip(again, proved, strict=True):
            largest[index] = length

    return bent, largest


@lru_cache(64)
def _strengths(
    rounding: float, length: float, frobenius: float, *, columns: int, unit: float, goal: float
) -> tuple[float, float, float]:
    """Return b, a, and a bound on ``|X (I - b G^2 - a G^4)|_2`` (docs/theory/steps.md)."""
    if length <= goal:
        return 0.0, 0.0, length
    g = rounded_sums(columns) * unit
    errors = []
    error = rounding + unit * (length * frobenius + rounding)
    for power in (1, 2):
        size = length ** (2 * power - 1) * frobenius + error
        error = 2.0 * length ** (2 * power) * error + error * error + g * size * size
        # Multiplying the powers by b and a rounds them, and so does their sum.
        bend = length ** (4 * power - 1) * frobenius + error
        errors.append(length * error + (g + 4.0 * unit) * frobenius * bend)

    stored = (columns / PIECE + 10) * unit * frobenius
    wanted = length - goal + stored
    fourth = length**4
    eighth = length**8
    by_fifth = (length - errors[0] / fourth) / 5.0
    by_ninth = (length - errors[1] / eighth) / 9.0
    if not 0.0 < by_ninth < by_fifth:
        return 0.0, 0.0, math.inf
    if wanted <= by_ninth:
        return 0.0, wanted / (9.0 * eighth * by_ninth), goal
    if wanted > by_fifth:
        by_ninth = (length + errors[1] / eighth) / 9.0

    t = (wanted - by_fifth) / (by_ninth - by_fifth)
    reached = goal
    if t < -1.0:
        t = -1.0
        reached = length + stored - 2.0 * by_fifth + by_ninth
    return (1.0 - t) / (5.0 * fourth), t / (9.0 * eighth), reached
