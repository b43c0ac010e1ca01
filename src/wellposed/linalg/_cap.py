"""Cap the largest singular value of a matrix by matrix products alone, with a proof."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from wellposed.errors import ConfigError, ConvergenceError, ShapeError
from wellposed.linalg._norms import (
    PIECE,
    SVD_MARGIN,
    certified_spectral_norm,
    factor_rounding,
    has_factor,
    product,
    rounded_sums,
    symmetric_product,
)
from wellposed.linalg._orthogonal import factor
from wellposed.linalg._tensors import Workspace, compute_dtype, full_precision, tall

CapMethod = Literal["inside", "polynomial", "exact"]
# Room below the bound, so that `certified_spectral_norm` of the result, margin included, is at most
# the bound.
_TOP = 1.0 - 3 * SVD_MARGIN
# Norm to prove of a matrix as stored, so that its certified norm is at most the bound.
_PROVED = 1.0 - 1.5 * SVD_MARGIN
# Bounds on the norm to try: inside, then 4e-3 above, sqrt 2 times as far each time. Above the last,
# two polynomials are not enough.
_RUNGS = (_TOP, *(1.0 + 2.0 ** (power / 2) for power in range(-16, 0)))
# If the root mean square of the singular values is above this many bounds, a Gram matrix loses too
# many digits.
_NEAR = 8.0
# A proof in float32 may be this loose (in the squared norm), else it is made in float64.
_LOOSE = 4e-2
_MAX_TRIES = 16
# Norms, in bounds, that float32 eigenvectors cap closely enough. Lower ones may be inside, and of
# higher ones too few digits are left.
_ROUGH = (1.001, 1.75)
# Margin below the cap in float64, for the rounding of float32.
_ROUGHER = 5e-7
# Decay of a guessed rung: a norm that was outside once is guessed to be inside after 2 to 14 steps,
# and is no longer watched when its guess is below the second number.
_HOLD, _LATELY = 0.95, 0.02
# A step that is ahead looks so many rungs higher, that is up to 2.8 times as far above the bound, but
# not above the highest rung for which one polynomial is enough.
_RISE, _ONCE = 3, 14


class SpectralCap(NamedTuple):
    """Method of `cap_spectral_norm_`, and a proved bound on ``|W|_2`` before it.

    For ``"exact"`` it is the Frobenius norm; with ``nearest`` an estimate within 1e-6, not proved.
    """

    method: CapMethod
    before: float


def cap_spectral_norm_(weight: Tensor, *, bound: float = 1.0) -> SpectralCap:
    """Clip the singular values of W at ``bound``, in place. A W proved inside is left unchanged.

    Status: certified for the matrix as stored, rounding included: a Cholesky factor proves the norm
    (Rump 2006); power iteration is never used. Up to 1.7 bounds, a polynomial moves all singular
    values: up to l = 1.125 bounds, those of half a bound by at most ``(l - 1) / 512`` bounds.
    Beyond, those above the bound are set to it. In half precision rounding may then shrink W by
    1e-4.
    Derivation: docs/theory/steps.md.
    Source: `wellposed`; soft caps by odd polynomials, unproved: Newhouse et al. 2025, arXiv
    2507.13338.

    Args:
        weight: (rows, columns), floating, changed in place; may be a view.
        bound: above 0.

    Raises:
        ConvergenceError: W is not finite; it is left unchanged.
        ShapeError: not a matrix. ConfigError: bound not above 0, or not finite.

    Cost: in products of W with its Gram matrix, float32 at 512 x 512 on a CPU: 1.5 if W is inside,
    5 up to 1.4 bounds, 8 up to 1.7, 15 beyond. When not to use: for many matrices take
    `cap_spectral_norms_`; for occasional use, divide by `certified_spectral_norm`.

    >>> weight = torch.diag(torch.tensor([1.05, 0.5]))
    >>> cap_spectral_norm_(weight).method, bool(torch.linalg.matrix_norm(weight, 2) <= 1)
    ('polynomial', True)
    """
    return cap_spectral_norms_([weight], bound=bound)[0]


def cap_spectral_norms_(
    weights: Sequence[Tensor],
    *,
    bound: float = 1.0,
    nearest: bool = False,
    before: Sequence[float] | None = None,
    workspace: Workspace | None = None,
) -> list[SpectralCap]:
    """Do `cap_spectral_norm_` for matrices of one shape, dtype and device in batched products.

    Status, source and errors: as `cap_spectral_norm_`, whose result differs only by the rounding of
    its products. Each matrix has its own proof. If one is not finite, nothing is written.

    Args:
        weights: (rows, columns) each, floating, changed in place; may be views.
        bound: above 0, for all.
        nearest: always use eigenvectors, and proofs in float64 of what they changed. Singular
            values above the bound end within 5e-6 of it in float32, 3e-6 in float64. Those below
            move by the dtype's rounding.
        before: `SpectralCap.before` of each after the last step, the start of the search. The
            result is the same without it, and takes about half longer.
        workspace: If it is ahead of its reads, only norms near that of the last step, and one higher, are tried, and
            `Workspace.finish` writes the results. A falling norm is followed by one value a step.

    Raises:
        ShapeError: no matrices, or not of one shape, dtype and device.

    Cost: small matrices take a tenth of the time of one after the other; memory of about six copies
    of all. With `nearest` more than twice the time in float32.

    >>> [cap.method for cap in cap_spectral_norms_([0.5 * torch.eye(3), 1.05 * torch.eye(3)])]
    ['inside', 'polynomial']
    """
    targets = [tall(weight.detach()) if weight.dim() == 2 else weight for weight in weights]
    kinds = {(tuple(target.shape), target.dtype, target.device) for target in targets}
    if len(kinds) != 1 or targets[0].dim() != 2 or not targets[0].is_floating_point():
        received = ", ".join(f"{dtype} {shape}" for shape, dtype, _ in sorted(kinds, key=str))
        raise ShapeError(
            "cap_spectral_norm_: expected a floating matrix (rows, columns), or several of one"
            f" shape, dtype and device, received {received or 'none'}"
        )
    if not 0.0 < bound < math.inf:
        raise ConfigError(
            f"cap_spectral_norm_: bound must be above 0 and finite, received {bound!r}"
        )
    if targets[0].numel() == 0:
        return [SpectralCap("inside", 0.0)] * len(targets)
    work = workspace or Workspace()
    with torch.no_grad(), full_precision(targets[0].device.type):
        is_one = len(targets) == 1 and not work.is_ahead
        stack = targets[0][None] if is_one else torch.stack(targets)
        hints = [0.0] * len(targets) if before is None else [norm / bound for norm in before]
        caps = _cap_(stack, bound, hints, work, nearest=nearest)
        moved = [index for index, cap in enumerate(caps) if cap.method != "inside"]
        if moved and not is_one:
            outside, inside = [targets[index] for index in moved], [stack[index] for index in moved]
            work.write(lambda: torch._foreach_copy_(outside, inside))
    return caps


def _cap_(
    stack: Tensor,
    bound: float,
    hints: Sequence[float],
    work: Workspace,
    *,
    nearest: bool,
    is_wide: bool = False,
) -> list[SpectralCap]:
    """Cap every matrix of (batch, rows, columns) in place; all in float64 if ``is_wide``."""
    limit = _NEAR * math.sqrt(stack.shape[-1])
    norms, sizes = _sizes(stack, work, bound, below=limit)
    if not all(map(math.isfinite, sizes)) and not bool(torch.isfinite(stack).all()):
        raise ConvergenceError(
            f"cap_spectral_norm_: the {tuple(stack.shape[1:])} matrix is not finite"
        )
    caps = [
        SpectralCap("inside" if size <= _TOP else "exact", size * bound * (1.0 + SVD_MARGIN))
        for size in sizes
    ]
    near = [place for place, size in enumerate(sizes) if _TOP < size <= limit]
    far = [place for place, size in enumerate(sizes) if size > limit]
    gram = None
    if near:
        dtype = torch.float64 if is_wide else compute_dtype(stack)
        point = _scaled(_of(stack, near).to(dtype), 1.0 / bound)
        grams = _measure(point, _of(norms, near), [sizes[place] for place in near])
        rungs = (_PROVED,) if nearest else _RUNGS
        tried, depth = _proved_lengths(grams, rungs, [hints[place] for place in near], work)
        proved = _Proved(near, point, grams, tried, depth, rungs[0])
        lengths = tried[0]
        if nearest:
            gram = grams.of([place for place, length in enumerate(lengths) if length > 1.0]).gram
        for place, length in zip(near, lengths, strict=True):
            if length <= rungs[0]:
                caps[place] = SpectralCap("inside", rungs[0] * bound)
        caps = [
            cap if done is None else done
            for cap, done in zip(
                caps, _capped_by_products_(stack, proved, bound, work), strict=True
            )
        ]
    left = [place for place in near if caps[place].method == "exact"]
    is_exact = not left or gram is None or gram.dtype == torch.float64
    done = {} if is_exact else _roughly(stack, left, bound, gram)
    caps, left = [done.get(place, cap) for place, cap in enumerate(caps)], [] if done else left
    for places, clipped in ((left, _by_eigenvectors), (far, _by_singular_vectors)):
        if places:
            value, lengths = clipped(_of(stack, places), bound, gram)
            _put(stack, places, _stored(value, stack.dtype, bound, work))
            if nearest:
                exact = lengths.mul_(1.0 + SVD_MARGIN).tolist()
                for place, length in zip(places, exact, strict=True):
                    caps[place] = SpectralCap("exact", length)
    return caps


class _Proved(NamedTuple):
    """Matrices over the bound, and the norms that are proved of them, as `_proved_lengths`."""

    places: list[int]
    point: Tensor
    grams: _Grams
    tried: list[list[float]]
    depth: Tensor
    floor: float
    """The norm of which nothing is to be done."""


def _capped_by_products_(
    stack: Tensor, proved: _Proved, bound: float, work: Workspace
) -> list[SpectralCap | None]:
    """Cap those in place for which polynomials are enough; return a cap for each of these."""
    near, point, grams, tried, depth, floor = proved
    caps: list[SpectralCap | None] = [None] * len(stack)
    outside = [index for index, length in enumerate(tried[0]) if floor < length < math.inf]
    if not outside:
        return caps

    # Storing rounds them once more.
    goal = _TOP - (0.0 if point.dtype == stack.dtype else torch.finfo(stack.dtype).eps)
    some = [[row[index] for index in outside] for row in tried]
    depth = _of(depth, outside)
    bent, reached = _bent(_of(point, outside), grams.of(outside), some, depth, goal, work)
    fits = [index for index, length in enumerate(reached) if length <= goal]
    places = [near[outside[index]] for index in fits]
    for place, index in zip(places, fits, strict=True):
        caps[place] = SpectralCap("polynomial", some[0][index] * bound)

    value = _scaled(_of(bent, fits), bound)
    if point.dtype != stack.dtype:
        value = _stored(value.double(), stack.dtype, bound, work)
    if len(tried) > 1:
        # In a step that is ahead, a matrix that turns out to be inside is unchanged.
        is_inside = _chosen(some, depth) <= _TOP
        value = torch.where(_of(is_inside, fits)[:, None, None], _of(stack, places), value)
    _put(stack, places, value)
    return caps


def _roughly(
    stack: Tensor, places: list[int], bound: float, gram: Tensor | None
) -> dict[int, SpectralCap]:
    """Cap by float32 eigenvectors where these are close enough, else all over in float64."""
    value, lengths = _by_eigenvectors(_of(stack, places), bound, gram)
    low, high = (part * bound for part in _ROUGH)
    tops = dict(enumerate(lengths.tolist()))
    sure, work = [at for at, top in tops.items() if low < top <= high], Workspace()
    done = {places[at]: SpectralCap("exact", tops[at] * (1.0 + SVD_MARGIN)) for at in sure}
    if sure:
        _put(stack, [*done], _stored(_of(value, sure), stack.dtype, bound, work))
    if unsure := [place for place in places if place not in done]:
        part, hints = _of(stack, unsure).clone(), [0.0] * len(unsure)
        again = _cap_(part, bound, hints, work, nearest=True, is_wide=True)
        done |= zip(unsure, again, strict=True)
        _put(stack, unsure, part)
    return done


def _sizes(
    stack: Tensor, work: Workspace, bound: float = 1.0, *, below: float = math.inf
) -> tuple[Tensor, Sequence[float]]:
    """Return ``|X|_F / bound`` of each matrix, and upper bounds of it."""
    norms = torch.linalg.vector_norm(stack, dim=(-2, -1), dtype=torch.float64)
    norms *= (1.0 + SVD_MARGIN) / bound
    return norms, work.bounds("size", norms, slack=1.1, below=below)


def _scaled(values: Tensor, factor: float) -> Tensor:
    return values if factor == 1.0 else values * factor


def _beside(like: Tensor, values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Copy host numbers to the device of a tensor; nothing waits for them."""
    return torch.tensor(values, dtype=dtype).to(like.device, non_blocking=True)


def _of(values: Tensor, places: Sequence[int]) -> Tensor:
    """Return some matrices of a batch; the batch itself if all are chosen."""
    if len(places) == len(values):
        return values
    return values.index_select(0, _beside(values, places, torch.long))


def _put(stack: Tensor, places: Sequence[int], values: Tensor) -> None:
    if len(places) == len(stack):
        stack.copy_(values)
    else:
        stack.index_copy_(0, _beside(stack, places, torch.long), values)


class _Grams(NamedTuple):
    """Matrices G within ``rounding norm^2`` of ``X^T X``, and bounds on ``norm = |X|_F``."""

    gram: Tensor
    norm: Tensor
    size: Sequence[float]
    rounding: float

    def of(self, places: list[int]) -> _Grams:
        """Return those of some of the matrices."""
        sizes = [self.size[place] for place in places]
        return _Grams(_of(self.gram, places), _of(self.norm, places), sizes, self.rounding)


def _measure(point: Tensor, norms: Tensor, sizes: Sequence[float]) -> _Grams:
    rows, columns = point.shape[-2:]
    terms = rounded_sums(rows)
    if point.dtype != torch.float64 and terms * columns * _unit(torch.float32) > _LOOSE:
        point = point.double()
    gram = symmetric_product(point.mT, point)
    return _Grams(gram, norms, sizes, terms * _unit(point.dtype))


def _proved_lengths(
    grams: _Grams, rungs: Sequence[float], hints: Sequence[float], work: Workspace
) -> tuple[list[list[float]], Tensor]:
    """Return rows of rungs, and the row of the least one proved for each X; inf if none is."""
    last = len(rungs) - 1
    depth = torch.zeros(len(hints), dtype=torch.long, device=grams.gram.device)
    if (guess := work.guess("rung", len(hints))) is not None:
        at = [min(round(old), last) for old in guess]
        # One that was outside within some 80 steps may be so again, though it is inside now.
        far = [
            _above(place, last) if old >= _LATELY else 0
            for place, old in zip(at, guess, strict=True)
        ]
        rows = [far, at, [max(place - 1, 0) for place in at]] if any(far) else [at]
        wanted = [rungs[place] ** 2 for row in rows for place in row]
        is_shown = _within(grams, wanted, is_ahead=True).view(len(rows), -1)
        for row in range(1, len(rows)):
            depth = torch.where(is_shown[row], row, depth)
        rung = torch.where(is_shown.any(0), _chosen(rows, depth), math.inf)
        work.bounds("rung", rung, slack=1.0, decay=_HOLD, guess=far)
        return [[rungs[place] for place in row] for row in rows], depth
    at = [min(bisect.bisect_left(rungs, hint * (1.0 - SVD_MARGIN)), last) for hint in hints]
    low, high, reach = [-1] * len(at), [last + 1] * len(at), 1
    while left := [place for place in range(len(at)) if high[place] - low[place] > 1]:
        wanted = [rungs[at[place]] ** 2 for place in left]
        for place, is_shown in zip(left, _within(grams.of(left), wanted).tolist(), strict=True):
            (high if is_shown else low)[place] = at[place]
            if low[place] >= 0 and high[place] <= last:
                at[place] = (low[place] + high[place]) // 2
            else:
                step = at[place] + (-reach if is_shown else reach)
                at[place] = min(max(step, low[place] + 1), high[place] - 1)
        reach *= 2
    rung = torch.tensor([place if place <= last else math.inf for place in high])
    work.bounds("rung", rung, slack=1.0, decay=_HOLD)
    return [[rungs[place] if place <= last else math.inf for place in high]], depth


def _above(place: int, last: int) -> int:
    """Return the rung to which a norm may rise in a step, by one polynomial if that is enough."""
    return min(place + _RISE, max(place + 1, _ONCE), last)


def _chosen(
    rows: Sequence[Sequence[float]], depth: Tensor, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return of each column of the rows the number in the row that ``depth`` names."""
    table = _beside(depth, [number for row in rows for number in row], dtype)
    return table.view(len(rows), -1).gather(0, depth[None])[0]


def _within(grams: _Grams, wanted: Sequence[float], *, is_ahead: bool = False) -> Tensor:
    """Whether ``|X|_2^2 <= wanted`` is proved, for each X (and each wish, one after the other)."""
    diagonal = grams.gram.diagonal(dim1=-2, dim2=-1)
    columns, count = diagonal.shape[-1], len(wanted) // len(diagonal)
    trace = diagonal.sum(-1, dtype=torch.float64).repeat(count)
    hidden = factor_rounding(grams.gram)
    # The trace of s I - G is at least s, which covers the rounding of the trace itself.
    largest = _beside(trace, [(1.0 - hidden) * limit for limit in wanted], trace.dtype)
    without_trace = [(1.0 - hidden * columns) * limit for limit in wanted]
    shift = _beside(trace, without_trace, trace.dtype).add_(trace, alpha=hidden)
    shift = torch.minimum(shift, largest)
    shift.sub_(grams.norm.square().repeat(count), alpha=grams.rounding)
    if is_ahead:
        return has_factor(grams.gram, shift)
    is_within = diagonal.amax(-1).repeat(count) <= _beside(diagonal, wanted, diagonal.dtype)
    tried = torch.nonzero(is_within).flatten().tolist()
    if tried:
        is_within[tried] = has_factor(_of(grams.gram, tried), shift[tried])
    return is_within


def _bent(  # noqa: PLR0917
    point: Tensor,
    grams: _Grams,
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
    strength = partial(_strengths, columns=point.shape[-1], unit=_unit(point.dtype), goal=goal)
    rows = [list(map(strength, rounding, row, sizes)) for row in lengths]
    fifth, ninth, reached = ([[three[part] for three in row] for row in rows] for part in range(3))
    square = grams.gram.to(point)
    square = symmetric_product(square, square)
    bend = symmetric_product(square, square).mul_(_chosen(ninth, depth, point.dtype)[:, None, None])
    if any(map(any, fifth)):
        bend.addcmul_(square, _chosen(fifth, depth, point.dtype)[:, None, None])
    bent = product(point, bend, plus=point, alpha=-1.0)
    again = [
        place
        for place in range(len(point))
        if any(
            goal < new[place] <= 0.9 * old[place] for new, old in zip(reached, lengths, strict=True)
        )
    ]
    largest = [max(row[place] for row in reached) for place in range(len(point))]
    if again:
        part, known = _of(bent, again), [[row[place] for place in again] for row in reached]
        grams = _measure(part, *_sizes(part, work))
        part, proved = _bent(part, grams, known, _of(depth, again), goal, work)
        _put(bent, again, part)
        for place, length in zip(again, proved, strict=True):
            largest[place] = length
    return bent, largest


@lru_cache(64)
def _strengths(
    rounding: float, length: float, frobenius: float, *, columns: int, unit: float, goal: float
) -> tuple[float, float, float]:
    """Return b, a, and a bound on ``|X (I - b G^2 - a G^4)|_2`` (docs/theory/steps.md)."""
    if length <= goal:
        return 0.0, 0.0, length
    g = rounded_sums(columns) * unit
    errors, error = [], rounding + unit * (length * frobenius + rounding)
    for power in (1, 2):
        size = length ** (2 * power - 1) * frobenius + error
        error = 2.0 * length ** (2 * power) * error + error * error + g * size * size
        # Multiplying the powers by b and a rounds them, and so does their sum.
        bend = length ** (4 * power - 1) * frobenius + error
        errors.append(length * error + (g + 4.0 * unit) * frobenius * bend)
    stored = (columns / PIECE + 10) * unit * frobenius
    wanted = length - goal + stored
    fourth, eighth = length**4, length**8
    by_fifth, by_ninth = (length - errors[0] / fourth) / 5.0, (length - errors[1] / eighth) / 9.0
    if not 0.0 < by_ninth < by_fifth:
        return 0.0, 0.0, math.inf
    if wanted <= by_ninth:
        return 0.0, wanted / (9.0 * eighth * by_ninth), goal
    if wanted > by_fifth:
        by_ninth = (length + errors[1] / eighth) / 9.0
    t = (wanted - by_fifth) / (by_ninth - by_fifth)
    reached = goal
    if t < -1.0:
        t, reached = -1.0, length + stored - 2.0 * by_fifth + by_ninth
    return (1.0 - t) / (5.0 * fourth), t / (9.0 * eighth), reached


def _by_eigenvectors(matrices: Tensor, bound: float, gram: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return W with singular values clipped at the bound, and its norm before.

    ``gram`` is that of W over the bound; its dtype, or float64, is that of the result.
    """
    point, top = matrices.to(torch.float64 if gram is None else gram.dtype), bound * _TOP
    cutoff = top if gram is None else _TOP
    gram = symmetric_product(point.mT, point) if gram is None else gram
    values, vectors = torch.linalg.eigh(gram)
    count = int((values > cutoff * cutoff * (1.0 - SVD_MARGIN)).sum(-1).max())
    vectors = vectors[..., -max(1, count) :]
    if vectors.dtype != torch.float64:  # a Newton-Schulz step makes them orthonormal
        top -= bound * _ROUGHER
        error = symmetric_product(vectors.double().mT, vectors.double())
        error.diagonal(dim1=-2, dim2=-1).sub_(1.0)
        vectors = torch.baddbmm(vectors, vectors, error.float(), alpha=-0.5)
    images = point @ vectors
    lengths = torch.linalg.vector_norm(images, dim=-2, keepdim=True, dtype=torch.float64)
    images.mul_(1.0 - top / lengths.clamp_min(top))
    return torch.baddbmm(point, images, vectors.mT, alpha=-1.0), lengths.amax((-2, -1))


def _by_singular_vectors(matrices: Tensor, bound: float, _: object) -> tuple[Tensor, Tensor]:
    """Do as `_by_eigenvectors` if squaring would leave no digits to the small singular values."""
    before, values, after = factor(matrices)
    inside = before * values.clamp(max=bound * _TOP).unsqueeze(-2) @ after
    return inside, values[..., 0]


def _stored(value: Tensor, dtype: torch.dtype, bound: float, work: Workspace) -> Tensor:
    """Round to ``dtype``, shrinking each matrix until the rounded one is proved inside."""
    for attempt in range(_MAX_TRIES):
        rounded = value.to(dtype)
        point = _scaled(rounded.double(), 1.0 / bound)
        measured, wanted = _measure(point, *_sizes(point, work)), [_PROVED**2] * len(value)
        is_outside = ~_within(measured, wanted, is_ahead=work.is_ahead)
        if not any(work.bounds("stored", is_outside, guess=[0.0] * len(value))):
            return rounded
        reached = certified_spectral_norm(rounded, method="cholesky")
        shrink = bound / reached * (1.0 - 2.0 ** (attempt - _MAX_TRIES))
        value = value * torch.where(is_outside, shrink.clamp_max(1.0), 1.0)[:, None, None]
    raise ConvergenceError(
        f"cap_spectral_norm_: {tuple(value.shape[1:])} entries of {dtype} cannot be rounded into"
        f" |W|_2 <= {bound:g}"
    )


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2
