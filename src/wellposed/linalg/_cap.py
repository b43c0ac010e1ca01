"""Cap the largest singular value of a matrix by matrix products alone, with a proof."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from wellposed.errors import ConfigError, ConvergenceError, ShapeError
from wellposed.linalg._bend import bent_inside
from wellposed.linalg._norms import SVD_MARGIN, certified_spectral_norm, symmetric_product
from wellposed.linalg._orthogonal import factor
from wellposed.linalg._rungs import (
    PROVED,
    RUNGS,
    TOP,
    Grams,
    chosen,
    grams_of,
    is_within,
    low_norms,
    proved_lengths,
    put_,
    scaled,
    selected,
    sizes_of,
)
from wellposed.linalg._tensors import Workspace, compute_dtype, full_precision, tall

CapMethod = Literal["inside", "polynomial", "deflation", "exact"]
# If the root mean square of the singular values is above this many bounds, a Gram matrix loses too
# many digits.
_NEAR = 8.0
_MAX_TRIES = 16
# Norms, in bounds, that float32 eigenvectors cap closely enough. Lower ones may be inside, and of
# higher ones too few digits are left.
_ROUGH = (1.001, 1.75)
# Margin below the cap in float64, for the rounding of float32.
_ROUGHER = 5e-7


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
    rooms: Sequence[float] | None = None,
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
        rooms: Norms below the bound. If one at most that is proved, `SpectralCap.before` is the proved norm, within
            20 %, instead of the bound; the search is a few products of the Gram matrix with a vector, and a proof.
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
        lower = None if rooms is None else [room / bound for room in rooms]
        caps = _cap_(stack, bound, hints, work, nearest=nearest, rooms=lower)
        moved = [index for index, cap in enumerate(caps) if cap.method != "inside"]
        if moved and not is_one:
            outside = [targets[index] for index in moved]
            inside = [stack[index] for index in moved]
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
    rooms: Sequence[float] | None = None,
) -> list[SpectralCap]:
    """Cap every matrix of (batch, rows, columns) in place; all in float64 if ``is_wide``."""
    limit = _NEAR * math.sqrt(stack.shape[-1])
    norms, sizes = sizes_of(stack, work, bound, below=limit)
    if not all(map(math.isfinite, sizes)) and not bool(torch.isfinite(stack).all()):
        raise ConvergenceError(
            f"cap_spectral_norm_: the {tuple(stack.shape[1:])} matrix is not finite"
        )

    caps = [
        SpectralCap("inside" if size <= TOP else "exact", size * bound * (1.0 + SVD_MARGIN))
        for size in sizes
    ]
    far = [index for index, size in enumerate(sizes) if size > limit]
    left = [index for index, size in enumerate(sizes) if TOP < size <= limit]
    gram = None
    if left:
        dtype = torch.float64 if is_wide else compute_dtype(stack)
        point = scaled(selected(stack, left).to(dtype), 1.0 / bound)
        grams = grams_of(point, selected(norms, left), [sizes[index] for index in left])
        near = _Near(left, point, grams)
        if rooms is not None and any(rooms):
            near = _without_low(near, rooms, caps, bound)
        if near.places:
            gram = _cap_by_proofs_(stack, near, caps, bound, hints, work, nearest=nearest)
        left = [index for index in near.places if caps[index].method == "exact"]

    is_exact = not left or gram is None or gram.dtype == torch.float64
    done = {} if is_exact else _roughly(stack, left, bound, gram)
    caps = [done.get(index, cap) for index, cap in enumerate(caps)]
    left = [] if done else left
    for places, clipped in ((left, _by_eigenvectors), (far, _by_singular_vectors)):
        if places:
            value, lengths = clipped(selected(stack, places), bound, gram)
            put_(stack, places, _stored(value, stack.dtype, bound, work))
            if nearest:
                exact = lengths.mul_(1.0 + SVD_MARGIN).tolist()
                for index, length in zip(places, exact, strict=True):
                    caps[index] = SpectralCap("exact", length)

    return caps


class _Near(NamedTuple):
    """Matrices whose norms are to be proved: their places, themselves, and their Gram matrices."""

    places: list[int]
    point: Tensor
    grams: Grams


def _without_low(
    near: _Near, rooms: Sequence[float], caps: list[SpectralCap], bound: float
) -> _Near:
    """Enter those that are proved at most their ``rooms`` as inside; return the others."""
    lengths = low_norms(near.grams, [rooms[position] for position in near.places])
    for position, length in zip(near.places, lengths, strict=True):
        if length < math.inf:
            caps[position] = SpectralCap("inside", length * bound)
    others = [index for index, length in enumerate(lengths) if length == math.inf]
    if len(others) == len(lengths):
        return near
    places = [near.places[index] for index in others]
    return _Near(places, selected(near.point, others), near.grams.selected(others))


def _cap_by_proofs_(  # noqa: PLR0917
    stack: Tensor,
    near: _Near,
    caps: list[SpectralCap],
    bound: float,
    hints: Sequence[float],
    work: Workspace,
    *,
    nearest: bool,
) -> Tensor | None:
    """Enter what is inside, cap what polynomials can; if ``nearest``, return the other Grams."""
    rungs = (PROVED,) if nearest else RUNGS
    wanted = [hints[position] for position in near.places]
    tried, depth = proved_lengths(near.grams, rungs, wanted, work)
    for position, length in zip(near.places, tried[0], strict=True):
        if length <= rungs[0]:
            caps[position] = SpectralCap("inside", rungs[0] * bound)

    proved = _Proved(*near, tried, depth, rungs[0])
    for position, cap in enumerate(_capped_by_products_(stack, proved, bound, work)):
        caps[position] = caps[position] if cap is None else cap

    if not nearest:
        return None
    outside = [index for index, length in enumerate(tried[0]) if length > 1.0]
    return near.grams.selected(outside).gram


class _Proved(NamedTuple):
    """Matrices over the bound, and the norms that are proved of them, as `proved_lengths`."""

    places: list[int]
    point: Tensor
    grams: Grams
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
    goal = TOP - (0.0 if point.dtype == stack.dtype else torch.finfo(stack.dtype).eps)
    some = [[row[index] for index in outside] for row in tried]
    depth = selected(depth, outside)
    bent, reached = bent_inside(
        selected(point, outside), grams.selected(outside), some, depth, goal, work
    )
    fits = [index for index, length in enumerate(reached) if length <= goal]
    places = [near[outside[index]] for index in fits]
    for position, index in zip(places, fits, strict=True):
        caps[position] = SpectralCap("polynomial", some[0][index] * bound)

    value = scaled(selected(bent, fits), bound)
    if point.dtype != stack.dtype:
        value = _stored(value.double(), stack.dtype, bound, work)
    if len(tried) > 1:
        # In a step that is ahead, a matrix that turns out to be inside is unchanged.
        is_inside = chosen(some, depth) <= TOP
        value = torch.where(
            selected(is_inside, fits)[:, None, None], selected(stack, places), value
        )
    put_(stack, places, value)
    return caps


def _roughly(
    stack: Tensor, places: list[int], bound: float, gram: Tensor | None
) -> dict[int, SpectralCap]:
    """Cap by float32 eigenvectors where these are close enough, else all over in float64."""
    value, lengths = _by_eigenvectors(selected(stack, places), bound, gram)
    low, high = (part * bound for part in _ROUGH)
    tops = dict(enumerate(lengths.tolist()))
    sure = [at for at, top in tops.items() if low < top <= high]
    work = Workspace()
    done = {places[at]: SpectralCap("exact", tops[at] * (1.0 + SVD_MARGIN)) for at in sure}
    if sure:
        put_(stack, [*done], _stored(selected(value, sure), stack.dtype, bound, work))

    unsure = [index for index in places if index not in done]
    if unsure:
        part = selected(stack, unsure).clone()
        hints = [0.0] * len(unsure)
        again = _cap_(part, bound, hints, work, nearest=True, is_wide=True)
        done |= zip(unsure, again, strict=True)
        put_(stack, unsure, part)

    return done


def _by_eigenvectors(matrices: Tensor, bound: float, gram: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return W with singular values clipped at the bound, and its norm before.

    ``gram`` is that of W over the bound; its dtype, or float64, is that of the result.
    """
    point = matrices.to(torch.float64 if gram is None else gram.dtype)
    top = bound * TOP
    cutoff = top if gram is None else TOP
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
    inside = before * values.clamp(max=bound * TOP).unsqueeze(-2) @ after
    return inside, values[..., 0]


def _stored(value: Tensor, dtype: torch.dtype, bound: float, work: Workspace) -> Tensor:
    """Round to ``dtype``, shrinking each matrix until the rounded one is proved inside."""
    for attempt in range(_MAX_TRIES):
        rounded = value.to(dtype)
        point = scaled(rounded.double(), 1.0 / bound)
        measured = grams_of(point, *sizes_of(point, work))
        wanted = [PROVED**2] * len(value)
        is_outside = ~is_within(measured, wanted, is_ahead=work.is_ahead)
        if not any(work.bounds("stored", is_outside, guess=[0.0] * len(value))):
            return rounded
        reached = certified_spectral_norm(rounded, method="cholesky")
        shrink = bound / reached * (1.0 - 2.0 ** (attempt - _MAX_TRIES))
        value = value * torch.where(is_outside, shrink.clamp_max(1.0), 1.0)[:, None, None]
    raise ConvergenceError(
        f"cap_spectral_norm_: {tuple(value.shape[1:])} entries of {dtype} cannot be rounded into"
        f" |W|_2 <= {bound:g}"
    )
