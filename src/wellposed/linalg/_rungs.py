"""Prove bounds on the spectral norms of a batch by Cholesky factors, on a ladder of guesses."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.linalg._norms import (
    SVD_MARGIN,
    factor_rounding,
    has_factor,
    ritz_vectors,
    rounded_sums,
    symmetric_product,
)
from wellposed.linalg._tensors import Workspace

# Room below the bound, so that `certified_spectral_norm` of the result, margin included, is at most
# the bound.
TOP = 1.0 - 3 * SVD_MARGIN
# Norm to prove of a matrix as stored, so that its certified norm is at most the bound.
PROVED = 1.0 - 1.5 * SVD_MARGIN
# Bounds on the norm to try: inside, then 4e-3 above, sqrt 2 times as far each time. Above the last,
# two polynomials are not enough.
RUNGS = (TOP, *(1.0 + 2.0 ** (power / 2) for power in range(-16, 0)))
# A proof in float32 may be this loose (in the squared norm), else it is made in float64.
_LOOSE = 4e-2
# Decay of a guessed rung: a norm that was outside once is guessed to be inside after 2 to 14 steps,
# and is no longer watched when its guess is below the second number.
_HOLD = 0.95
_LATELY = 0.02
# A step that is ahead looks so many rungs higher, that is up to 2.8 times as far above the bound, but
# not above the highest rung for which one polynomial is enough.
_RISE = 3
_ONCE = 14
# A norm below the first rung is guessed by so many Lanczos steps, and proved with this slack or that.
_LANCZOS = 8
_SLACKS = (1.04, 1.2)


def sizes_of(
    stack: Tensor, work: Workspace, bound: float = 1.0, *, below: float = math.inf
) -> tuple[Tensor, Sequence[float]]:
    """Return ``|X|_F / bound`` of each matrix, and upper bounds of it."""
    norms = torch.linalg.vector_norm(stack, dim=(-2, -1), dtype=torch.float64)
    norms *= (1.0 + SVD_MARGIN) / bound
    return norms, work.bounds("size", norms, slack=1.1, below=below)


def scaled(values: Tensor, factor: float) -> Tensor:
    return values if factor == 1.0 else values * factor


def on_device_of(like: Tensor, values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Copy host numbers to the device of a tensor; nothing waits for them."""
    return torch.tensor(values, dtype=dtype).to(like.device, non_blocking=True)


def selected(values: Tensor, places: Sequence[int]) -> Tensor:
    """Return some matrices of a batch; the batch itself if all are chosen."""
    if len(places) == len(values):
        return values
    return values.index_select(0, on_device_of(values, places, torch.long))


def put_(stack: Tensor, places: Sequence[int], values: Tensor) -> None:
    if len(places) == len(stack):
        stack.copy_(values)
    else:
        stack.index_copy_(0, on_device_of(stack, places, torch.long), values)


class Grams(NamedTuple):
    """Matrices G within ``rounding norm^2`` of ``X^T X``, and bounds on ``norm = |X|_F``."""

    gram: Tensor
    norm: Tensor
    size: Sequence[float]
    rounding: float

    def selected(self, places: list[int]) -> Grams:
        """Return those of some of the matrices."""
        sizes = [self.size[index] for index in places]
        return Grams(selected(self.gram, places), selected(self.norm, places), sizes, self.rounding)


def grams_of(point: Tensor, norms: Tensor, sizes: Sequence[float]) -> Grams:
    terms = rounded_sums(point.shape[-2])
    if _is_loose(point):
        point = point.double()
    gram = symmetric_product(point.mT, point)
    return Grams(gram, norms, sizes, terms * unit_of(point.dtype))


def _is_loose(point: Tensor) -> bool:
    rows, columns = point.shape[-2:]
    loss = rounded_sums(rows) * columns * unit_of(torch.float32)
    return point.dtype != torch.float64 and loss > _LOOSE


def lost_in_proof(point: Tensor, size: float) -> float:
    """Return what rounding hides of a squared norm 1 of X, if `grams_of` it proves it.

    ``size`` is ``|X|_F``. A proof may succeed for a little more, and for less it succeeds.
    """
    rows, columns = point.shape[-2:]
    dtype = torch.float64 if _is_loose(point) else point.dtype
    hidden = factor_rounding(point.new_empty((0, columns), dtype=dtype))
    return hidden * max(1.0, columns - size * size) + rounded_sums(rows) * unit_of(dtype) * size**2


def proved_lengths(
    grams: Grams, rungs: Sequence[float], hints: Sequence[float], work: Workspace
) -> tuple[list[list[float]], Tensor]:
    """Return rows of rungs, and the row of the least one proved for each X; inf if none is."""
    last = len(rungs) - 1
    depth = torch.zeros(len(hints), dtype=torch.long, device=grams.gram.device)
    guess = work.guess("rung", len(hints))
    if guess is not None:
        at = [min(round(old), last) for old in guess]
        # One that was outside within some 80 steps may be so again, though it is inside now.
        far = [
            _above(index, last) if old >= _LATELY else 0
            for index, old in zip(at, guess, strict=True)
        ]
        rows = [far, at, [max(index - 1, 0) for index in at]] if any(far) else [at]
        wanted = [rungs[index] ** 2 for row in rows for index in row]
        # (rungs matrices,) -> (rungs, matrices)
        is_shown = is_within(grams, wanted, is_ahead=True).view(len(rows), -1)
        for row in range(1, len(rows)):
            depth = torch.where(is_shown[row], row, depth)
        rung = torch.where(is_shown.any(0), chosen(rows, depth), math.inf)
        work.bounds("rung", rung, slack=1.0, decay=_HOLD, guess=far)
        return [[rungs[index] for index in row] for row in rows], depth

    at = [min(bisect.bisect_left(rungs, hint * (1.0 - SVD_MARGIN)), last) for hint in hints]
    low = [-1] * len(at)
    high = [last + 1] * len(at)
    reach = 1
    while left := [index for index in range(len(at)) if high[index] - low[index] > 1]:
        wanted = [rungs[at[index]] ** 2 for index in left]
        for index, is_shown in zip(
            left, is_within(grams.selected(left), wanted).tolist(), strict=True
        ):
            (high if is_shown else low)[index] = at[index]
            if low[index] >= 0 and high[index] <= last:
                at[index] = (low[index] + high[index]) // 2
            else:
                step = at[index] + (-reach if is_shown else reach)
                at[index] = min(max(step, low[index] + 1), high[index] - 1)
        reach *= 2

    rung = torch.tensor([index if index <= last else math.inf for index in high])
    work.bounds("rung", rung, slack=1.0, decay=_HOLD)
    return [[rungs[index] if index <= last else math.inf for index in high]], depth


def low_norms(grams: Grams, rooms: Sequence[float]) -> list[float]:
    """Return norms that are proved and at most ``rooms``; inf for those of which none is.

    A guess above the room ends the search, so a matrix without room costs at most its guess.
    """
    lengths = [math.inf] * len(rooms)
    corners = grams.gram.diagonal(dim1=-2, dim2=-1).amax(-1).sqrt().tolist()
    left = [index for index, low in enumerate(corners) if low < rooms[index]]
    if not left:
        return lengths

    some = grams.selected(left).gram
    top = ritz_vectors(some, _LANCZOS)[..., -1:].to(some)
    quotients = (top.mT @ (some @ top))[..., 0, 0] / top.square().sum((-2, -1))
    guesses = dict(zip(left, quotients.sqrt().tolist(), strict=True))
    for slack in _SLACKS:
        left = [index for index in left if guesses[index] < rooms[index]]
        if not left:
            break
        norms = [min(slack * guesses[index], rooms[index]) for index in left]
        are_shown = is_within(grams.selected(left), [norm * norm for norm in norms]).tolist()
        for index, norm, is_shown in zip(left, norms, are_shown, strict=True):
            if is_shown:
                lengths[index] = norm
        left = [index for index in left if lengths[index] == math.inf]

    return lengths


def _above(index: int, last: int) -> int:
    """Return the rung to which a norm may rise in a step, by one polynomial if that is enough."""
    return min(index + _RISE, max(index + 1, _ONCE), last)


def chosen(
    rows: Sequence[Sequence[float]], depth: Tensor, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return of each column of the rows the number in the row that ``depth`` names."""
    table = on_device_of(depth, [number for row in rows for number in row], dtype)
    return table.view(len(rows), -1).gather(0, depth[None])[0]


def is_within(grams: Grams, wanted: Sequence[float], *, is_ahead: bool = False) -> Tensor:
    """Whether ``|X|_2^2 <= wanted`` is proved, for each X (and each wish, one after the other)."""
    diagonal = grams.gram.diagonal(dim1=-2, dim2=-1)
    columns = diagonal.shape[-1]
    count = len(wanted) // len(diagonal)
    trace = diagonal.sum(-1, dtype=torch.float64).repeat(count)
    hidden = factor_rounding(grams.gram)
    # The trace of s I - G is at least s, which covers the rounding of the trace itself.
    largest = on_device_of(trace, [(1.0 - hidden) * limit for limit in wanted], trace.dtype)
    without_trace = [(1.0 - hidden * columns) * limit for limit in wanted]
    shift = on_device_of(trace, without_trace, trace.dtype).add_(trace, alpha=hidden)
    shift = torch.minimum(shift, largest)
    shift.sub_(grams.norm.square().repeat(count), alpha=grams.rounding)
    if is_ahead:
        return has_factor(grams.gram, shift)

    is_small = diagonal.amax(-1).repeat(count) <= on_device_of(diagonal, wanted, diagonal.dtype)
    tried = torch.nonzero(is_small).flatten().tolist()
    if tried:
        is_small[tried] = has_factor(selected(grams.gram, tried), shift[tried])
    return is_small


def unit_of(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2
