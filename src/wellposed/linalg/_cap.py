"""Keeps the largest singular value of a matrix below a bound by matrix products alone, with a
proved error."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from wellposed.errors import ConfigError, ConvergenceError, ShapeError
from wellposed.linalg._norms import (
    PIECE,
    SVD_MARGIN,
    add_product_,
    certified_spectral_norm,
    factor_rounding,
    has_factor,
    rounded_sums,
    symmetric_product,
)
from wellposed.linalg._orthogonal import factor
from wellposed.linalg._tensors import compute_dtype, full_precision, tall

CapMethod = Literal["inside", "polynomial", "exact"]
# Room below the bound, so that `certified_spectral_norm` of the result, margin included, is at most
# the bound.
_TOP = 1.0 - 3 * SVD_MARGIN
# What is proved of a matrix that is rounded to be stored, so that its certified norm is at most the
# bound.
_PROVED = 1.0 - 1.5 * SVD_MARGIN
# What is tried as a bound on the norm: inside, then 4e-3 above, sqrt 2 times as far each time. Beyond
# the last, two polynomials do not do.
_RUNGS = (_TOP, *(1.0 + 2.0 ** (power / 2) for power in range(-16, 0)))
# Where the root mean square of the singular values is beyond this many bounds, a Gram matrix would
# lose too much.
_NEAR = 8.0
# A proof in float32 may be this loose (in the squared norm); beyond, it is made in float64.
_LOOSE = 4e-2
_MAX_TRIES = 16


class SpectralCap(NamedTuple):
    """What `cap_spectral_norm_` did, and a proved bound on ``|W|_2`` before: of Frobenius where
    eigenvectors were needed."""

    method: CapMethod
    before: float


def cap_spectral_norm_(weight: Tensor, *, bound: float = 1.0) -> SpectralCap:
    """Change W as little as is cheap so that ``|W|_2 <= bound``; a W proved to be inside is not
    touched.

    Status: certified for the matrix as stored, rounding included: a Cholesky factor of ``L I - W^T
    W / bound^2`` proves ``|W|_2 <= l bound``, ``l = sqrt L`` (Rump 2006). The least l of 1 and ``1
    + 2^(-k/2)``, k = 1 to 16, that is proved decides. Where it is 1, W is left alone. Else, with
    ``G = W^T W / bound^2``, ``W (I - b G^2 - a G^4)`` is taken: every singular value s becomes ``s -
    b s^5 - a s^9``, which grows on [0, l] and ends at 1 less the rounding of its products, bounded
    a priori; b is 0 up to l = 1.125, where half the bound moves by ``a / 512``, ``a <= l - 1``.
    Beyond 1.4 that is done twice. Where no l is proved, every singular value above the bound is set
    to it (eigenvectors of G in float64), and what is stored is proved anew, which may shrink it by
    1e-4 in half precision. Source: `wellposed`; soft caps by odd polynomials are of Newhouse et al.
    (2025, arXiv 2507.13338), without a proof. Power iteration is nowhere.

    Args:
        weight: (rows, columns), floating, changed in place; may be a view.
        bound: above 0.

    Returns:
        `SpectralCap`.

    Raises:
        ConvergenceError: W is not finite; it is left as it was. ShapeError: not a matrix.
            ConfigError: bound not above 0, or not finite.

    Cost: in products of W with its Gram matrix, float32 at 512 x 512 on a CPU: 1.5 where W is
    inside, 5 up to 1.4 bounds, 8 up to 1.7, 15 beyond. `cap_spectral_norms_` does many of one shape
    at once.
    When not to use: where a weight is measured only now and then, `certified_spectral_norm` and a
    division do.

    >>> import torch
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
) -> list[SpectralCap]:
    """Do `cap_spectral_norm_` for matrices of one shape, dtype and device in batched products.

    Status, source and errors: of `cap_spectral_norm_`, whose result differs by the rounding of its
    products alone. Each matrix has a proof of its own. Nothing is written where one of them is not
    finite.

    Args:
        weights: (rows, columns) each, floating, changed in place; may be views.
        bound: above 0, of all.
        nearest: True: eigenvectors and proofs in float64 for all, never the polynomial: singular
            values above the bound end within 3e-6 of it, in float32 and float64, and those below it
            move by the rounding of the dtype alone.
        before: what was proved of each before the last step (`SpectralCap.before`), where the search
            for a proof begins; the result is the same without it, and takes about half longer.

    Returns:
        One `SpectralCap` for each matrix.

    Raises:
        ShapeError: no matrices, or not of one shape, dtype and device. ConvergenceError,
            ConfigError: as `cap_spectral_norm_`.

    Cost: small matrices take a tenth of the time of one after the other; memory of about six copies
    of all. With `nearest` more than twice the time in float32.

    >>> import torch
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
    with torch.no_grad(), full_precision(targets[0].device.type):
        is_one = len(targets) == 1
        stack = targets[0][None] if is_one else torch.stack(targets)
        hints = [0.0] * len(targets) if before is None else [each / bound for each in before]
        caps = _cap_(stack, bound, hints, nearest=nearest)
        moved = [index for index, cap in enumerate(caps) if cap.method != "inside"]
        if moved and not is_one:
            torch._foreach_copy_(
                [targets[index] for index in moved], [stack[index] for index in moved]
            )
    return caps


def _cap_(
    stack: Tensor, bound: float, hints: Sequence[float], *, nearest: bool
) -> list[SpectralCap]:
    """Cap every matrix of (batch, rows, columns) in place."""
    sizes = (torch.linalg.vector_norm(stack, dim=(-2, -1), dtype=torch.float64) / bound).tolist()
    if not all(map(math.isfinite, sizes)) and not bool(torch.isfinite(stack).all()):
        raise ConvergenceError(
            f"cap_spectral_norm_: the {tuple(stack.shape[1:])} matrix is not finite"
        )
    caps = [
        SpectralCap("inside" if size <= _TOP else "exact", size * bound * (1.0 + SVD_MARGIN))
        for size in sizes
    ]
    limit = _NEAR * math.sqrt(stack.shape[-1])
    near = [place for place, size in enumerate(sizes) if _TOP < size <= limit]
    far = [place for place, size in enumerate(sizes) if size > limit]
    if near:
        dtype = torch.float64 if nearest else compute_dtype(stack)
        point = (stack if len(near) == len(stack) else stack[near]).to(dtype) / bound
        grams = _measure(point)
        rungs = _RUNGS[:1] if nearest else _RUNGS
        lengths = _proved_lengths(grams, rungs, [hints[place] for place in near])
        outside = [index for index, length in enumerate(lengths) if _TOP < length < math.inf]
        # They are rounded once more when they are stored.
        goal = _TOP - (0.0 if dtype == stack.dtype else torch.finfo(stack.dtype).eps)
        bent, reached = point[outside], [lengths[index] for index in outside]
        if outside:
            reached = _bend_(bent, grams.of(outside), reached, goal)
        shown = [place for place, length in enumerate(reached) if length <= goal]
        inside = [index for index, length in enumerate(lengths) if length <= _TOP]
        for index in inside:
            caps[near[index]] = SpectralCap("inside", _TOP * bound)
        for index in [outside[place] for place in shown]:
            caps[near[index]] = SpectralCap("polynomial", lengths[index] * bound)
        if shown:
            value = bent[shown].mul_(bound)
            stack[[near[outside[place]] for place in shown]] = (
                value if dtype == stack.dtype else _stored(value.double(), stack.dtype, bound)
            )
    left = [place for place in near if caps[place].method == "exact"]
    for places, clipped in ((left, _by_eigenvectors), (far, _by_singular_vectors)):
        if places:
            stack[places] = _stored(clipped(stack[places], bound), stack.dtype, bound)
    return caps


class _Grams(NamedTuple):
    """Matrices G within ``rounding`` of ``X^T X`` of each X of a batch, their traces and largest
    diagonal entries, and ``|X|_F``."""

    gram: Tensor
    rounding: Tensor
    trace: Tensor
    longest: Tensor
    size: Tensor

    def of(self, places: list[int]) -> _Grams:
        """Those of some of the matrices."""
        if len(places) == len(self.gram):
            return self
        return _Grams(*(values[places] for values in self))


def _measure(point: Tensor) -> _Grams:
    rows, columns = point.shape[-2:]
    terms = rounded_sums(rows)
    if point.dtype != torch.float64 and terms * columns * _unit(torch.float32) > _LOOSE:
        point = point.double()
    gram = symmetric_product(point.mT, point)
    diagonal = gram.diagonal(dim1=-2, dim2=-1).double().cpu()
    trace = diagonal.sum(-1)
    hidden = terms * _unit(point.dtype)
    size = (trace / (1.0 - hidden)).clamp_min(0.0).sqrt()
    return _Grams(gram, hidden * size * size, trace, diagonal.amax(-1), size)


def _proved_lengths(grams: _Grams, rungs: Sequence[float], hints: Sequence[float]) -> list[float]:
    """Return the least of ``rungs`` for which ``|X|_2 <= rung`` is proved of each X, or infinity.

    The search begins at the hint, goes on in steps that double until the answer is between two
    rungs, and halves.
    """
    last = len(rungs) - 1
    at = [min(bisect.bisect_left(rungs, hint * (1.0 - SVD_MARGIN)), last) for hint in hints]
    low, high, reach = [-1] * len(at), [last + 1] * len(at), 1
    while left := [place for place in range(len(at)) if high[place] - low[place] > 1]:
        shown = _within(grams.of(left), [rungs[at[place]] ** 2 for place in left])
        for place, is_shown in zip(left, shown, strict=True):
            (high if is_shown else low)[place] = at[place]
            if low[place] >= 0 and high[place] <= last:
                at[place] = (low[place] + high[place]) // 2
            else:
                step = at[place] + (-reach if is_shown else reach)
                at[place] = min(max(step, low[place] + 1), high[place] - 1)
        reach *= 2
    return [rungs[place] if place <= last else math.inf for place in high]


def _within(grams: _Grams, wanted: Sequence[float]) -> list[bool]:
    """Whether ``|X|_2^2 <= wanted`` is proved of each X.

    A factorisation of s I - G that runs to its end proves that no eigenvalue of it is below minus
    its rounding, which is that of its sums times its trace at most. It is not tried where a column
    of G is longer.
    """
    limits = torch.tensor(wanted, dtype=torch.float64)
    columns = grams.gram.shape[-1]
    hidden = factor_rounding(grams.gram)
    slack = hidden * torch.maximum(columns * limits - grams.trace, limits) + grams.rounding
    shown = grams.longest <= limits
    tried = torch.nonzero(shown).flatten().tolist()
    if tried:
        shown[tried] = has_factor(grams.of(tried).gram, (limits - slack)[tried]).cpu()
    return shown.tolist()


def _bend_(point: Tensor, grams: _Grams, lengths: list[float], goal: float) -> list[float]:
    """Take ``X (I - b G^2 - a G^4)`` of each X, of ``|X|_2 <= length``, until ``|X|_2 <= goal``;
    return what is proved of each."""
    columns, unit = point.shape[-1], _unit(point.dtype)
    bends = [
        _strengths(*known, columns=columns, unit=unit, goal=goal)
        for known in zip(grams.rounding.tolist(), lengths, grams.size.tolist(), strict=True)
    ]
    fifth, ninth, reached = (list(each) for each in zip(*bends, strict=True))
    square = grams.gram.to(point)
    square = symmetric_product(square, square)
    bend = symmetric_product(square, square) * _each(ninth, point)
    if any(fifth):
        bend += square * _each(fifth, point)
    add_product_(point, point.clone(), bend, alpha=-1.0)
    again = [place for place, length in enumerate(reached) if goal < length <= 0.9 * lengths[place]]
    if again:
        part = point[again]
        further = _bend_(part, _measure(part), [reached[place] for place in again], goal)
        point[again] = part
        for place, length in zip(again, further, strict=True):
            reached[place] = length
    return reached


def _strengths(
    rounding: float, length: float, own: float, *, columns: int, unit: float, goal: float
) -> tuple[float, float, float]:
    """Return b, a, and a bound on ``|X (I - b G^2 - a G^4)|_2``, rounding included: the goal, or as
    near it as they can under which the largest s stays the largest.

    It is known that ``|X|_2 <= length``, ``|X|_F = own``, and that G is within ``rounding`` of ``X^T
    X``. A singular value s becomes f(s) = s - b s^5 - a s^9, of which ``f' = (1 - r) (1 + t r)``, r
    = (s / length)^4, for t in [-1, 1], or ``1 - c r^2``, where less is enough.

    The error of each product is followed in the Frobenius norm, where that of A B is at most ``g
    |A|_F |B|_F``; of the powers of G it is ``|G^k|_F <= length^(2 k - 1) |X|_F``, as no singular
    value exceeds the length and the sum of their squares is |X|_F^2.
    """
    g = rounded_sums(columns) * unit
    errors, error = [], rounding + unit * (length * own + rounding)
    for power in (1, 2):
        size = length ** (2 * power - 1) * own + error
        error = 2.0 * length ** (2 * power) * error + error * error + g * size * size
        # b and a multiply the powers, which rounds them, as does their sum.
        whole = length ** (4 * power - 1) * own + error
        errors.append(length * error + (g + 4.0 * unit) * own * whole)
    stored = (columns / PIECE + 10) * unit * own
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


def _each(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None, None]


def _by_eigenvectors(whole: Tensor, bound: float) -> Tensor:
    """Return the matrices, in float64, with every singular value above the bound set to it."""
    point = whole.double()
    values, vectors = torch.linalg.eigh(symmetric_product(point.mT, point))
    top = bound * _TOP
    count = int((values > top * top * (1.0 - SVD_MARGIN)).sum(-1).max())
    vectors = vectors[..., -max(1, count) :]
    images = point @ vectors
    lengths = torch.linalg.vector_norm(images, dim=-2, keepdim=True)
    return torch.baddbmm(
        point, images * (1.0 - top / lengths.clamp_min(top)), vectors.mT, alpha=-1.0
    )


def _by_singular_vectors(whole: Tensor, bound: float) -> Tensor:
    """Do as `_by_eigenvectors` where the squares of the largest leave no digits to the others."""
    before, values, after = factor(whole)
    return before * values.clamp(max=bound * _TOP).unsqueeze(-2) @ after


def _stored(value: Tensor, dtype: torch.dtype, bound: float) -> Tensor:
    """Return the batch in ``dtype``, each matrix shrunk until the rounded one is proved to be
    inside."""
    for attempt in range(_MAX_TRIES):
        rounded = value.to(dtype)
        shown = _within(_measure(rounded.double() / bound), [_PROVED**2] * len(value))
        if all(shown):
            return rounded
        reached = certified_spectral_norm(rounded, method="cholesky")
        shrink = bound / reached * (1.0 - 2.0 ** (attempt - _MAX_TRIES))
        is_outside = ~torch.tensor(shown, device=value.device)
        value = value * torch.where(is_outside, shrink.clamp_max(1.0), 1.0)[:, None, None]
    raise ConvergenceError(
        f"cap_spectral_norm_: {tuple(value.shape[1:])} entries of {dtype} cannot be rounded into"
        f" |W|_2 <= {bound:g}"
    )


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2
