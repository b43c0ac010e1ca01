"""The largest singular value held below a bound, with a proof in place of a trust in
convergence."""

from __future__ import annotations

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
    ritz_vectors,
    symmetric_product,
)
from wellposed.linalg._polar import compute_dtype, factor, full_precision, tall

CapMethod = Literal["inside", "polynomial", "exact"]
# Room below the bound, so that `certified_spectral_norm` of the result, margin included, is at most
# the bound.
_ROOM = 3 * SVD_MARGIN
# Where the root mean square of the singular values is beyond this many bounds, float32 would cancel
# too much.
_NEAR = 8.0
# Lanczos steps, and the slacks of the squared norm that are tried above their lower estimate.
_LANCZOS = 16
_SLACKS = (1e-2, 5e-2)
# A proof in float32 may be this loose (in the squared norm); beyond, it is made in float64.
_LOOSE = 4e-2
# Up to this side a Gram matrix is one product, and eigenvectors cost no more than what would avoid
# them.
_WHOLE = 128
_MAX_TRIES = 16


class SpectralCap(NamedTuple):
    """What `cap_spectral_norm_` did, and a proved bound on ``|W|_2`` before: of Frobenius where W
    was outside."""

    method: CapMethod
    before: float


def cap_spectral_norm_(weight: Tensor, *, bound: float = 1.0) -> SpectralCap:
    """Change W as little as is cheap so that ``|W|_2 <= bound``; a W proved to be inside is not
    touched.

    Status: certified for the matrix as stored, rounding included: a Cholesky factor of ``L I - W^T
    W / bound^2`` proves ``|W|_2 <= l bound``, ``l = sqrt L`` (Rump 2006). Where more than 128
    columns (or rows) have l below about 1.12, ``W (I - a (W^T W / bound^2)^4)`` is taken: every
    singular value s becomes ``s - a s^9``, which grows on [0, l] and ends at 1 less the rounding of
    its products, bounded a priori; a singular value of half the bound moves by ``a / 512``, ``a <=
    l - 1``. Everywhere else every singular value above the bound is set to it (eigenvectors of
    ``W^T W``; the nearest such matrix in the Frobenius norm, up to 0.5 % of the bound that rounding
    may hide), and the stored result is proved anew, which may shrink it by 1e-4 in half precision.
    Source: `wellposed`; soft caps by odd polynomials are of Newhouse et al. (2025, arXiv
    2507.13338), without a proof. Power iteration is nowhere.

    Args:
        weight: (rows, columns), floating, changed in place; may be a view.
        bound: above 0.

    Returns:
        `SpectralCap`.

    Raises:
        ConvergenceError: W is not finite; it is left as it was. ShapeError: not a matrix.
            ConfigError: bound not above 0, or not finite.

    Cost: in products of W with its Gram matrix, float32 at 256 x 256 on a CPU: 2 where W is inside,
    6 with the polynomial, about 9 with eigenvectors. `cap_spectral_norms_` does many of one shape
    at once.
    When not to use: where a weight is measured only now and then, `certified_spectral_norm` and a
    division do.

    >>> import torch
    >>> weight = torch.diag(torch.tensor([1.05, 0.5]))
    >>> cap_spectral_norm_(weight).method, bool(torch.linalg.matrix_norm(weight, 2) <= 1)
    ('exact', True)
    """
    return cap_spectral_norms_([weight], bound=bound)[0]


def cap_spectral_norms_(
    weights: Sequence[Tensor], *, bound: float = 1.0, nearest: bool = False
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

    Returns:
        One `SpectralCap` for each matrix.

    Raises:
        ShapeError: no matrices, or not of one shape, dtype and device. ConvergenceError,
            ConfigError: as `cap_spectral_norm_`.

    Cost: small matrices take a tenth of the time of one after the other; memory of about six copies
    of all. With `nearest` more than twice the time in float32.

    >>> import torch
    >>> [cap.method for cap in cap_spectral_norms_([0.5 * torch.eye(3), 1.05 * torch.eye(3)])]
    ['inside', 'exact']
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
        caps = _cap_(stack, bound, nearest=nearest)
        moved = [index for index, cap in enumerate(caps) if cap.method != "inside"]
        if moved and not is_one:
            torch._foreach_copy_(
                [targets[index] for index in moved], [stack[index] for index in moved]
            )
    return caps


def _cap_(stack: Tensor, bound: float, *, nearest: bool) -> list[SpectralCap]:
    """Cap every matrix of (batch, rows, columns) in place."""
    sizes = (torch.linalg.vector_norm(stack, dim=(-2, -1), dtype=torch.float64) / bound).tolist()
    if not all(map(math.isfinite, sizes)) and not bool(torch.isfinite(stack).all()):
        raise ConvergenceError(
            f"cap_spectral_norm_: the {tuple(stack.shape[1:])} matrix is not finite"
        )
    top = 1.0 - _ROOM
    caps = [
        SpectralCap("inside" if size <= top else "exact", size * bound * (1.0 + SVD_MARGIN))
        for size in sizes
    ]
    limit = _NEAR * math.sqrt(stack.shape[-1])
    near = [place for place, size in enumerate(sizes) if top < size <= limit]
    left = [place for place, size in enumerate(sizes) if size > limit]
    if near:
        part = stack if len(near) == len(stack) else stack[near]
        for place, cap in zip(near, _cap_near_(part, bound, nearest=nearest), strict=True):
            if cap is None:
                left.append(place)
            elif cap.method != "exact":
                caps[place] = cap
        if part is not stack:
            stack[near] = part
    if left:
        before, values, after = factor(stack[left])
        clipped = before * values.clamp(max=bound * top).unsqueeze(-2) @ after
        stack[left] = _proved(clipped, stack.dtype, bound)
    return caps


def _cap_near_(part: Tensor, bound: float, *, nearest: bool) -> list[SpectralCap | None]:
    """Prove or cap every matrix in place, and tell how; None for those no proof was found for."""
    dtype, top = torch.float64 if nearest else compute_dtype(part), 1.0 - _ROOM
    # They are rounded once more when they are stored.
    kept_off = 0.0 if dtype == part.dtype else torch.finfo(part.dtype).eps
    point = part.to(dtype) / bound
    grams = _measure(point)
    caps: list[SpectralCap | None] = [None] * len(point)

    def keep(places: list[int], capped: Tensor, how: list[SpectralCap]) -> list[int]:
        """Store the matrices of these places; return the places that are left."""
        capped = capped * bound
        part[places] = _proved(capped.double(), part.dtype, bound) if kept_off else capped
        for place, cap in zip(places, how, strict=True):
            caps[place] = cap
        return [place for place, cap in enumerate(caps) if cap is None]

    for place in _within(grams, [top * top] * len(point)):
        caps[place] = SpectralCap("inside", top * bound)
    left = [place for place, cap in enumerate(caps) if cap is None]
    if left and not nearest and grams.gram.shape[-1] > _WHOLE:
        found = zip(left, _strengths(grams.of(left), top - kept_off, _unit(dtype)), strict=True)
        bent = {place: strength for place, strength in found if strength is not None}
        if bent:
            places, (strengths, limits) = list(bent), zip(*bent.values(), strict=True)
            how = [SpectralCap("polynomial", math.sqrt(limit) * bound) for limit in limits]
            left = keep(places, _bent(point[places], grams.gram[places], strengths), how)
    if left:
        clipped = _clipped(point[left], grams.of(left), top)
        after = _measure(clipped)
        off = [kept_off + 4.0 * _unit(dtype) * size for size in after.size]
        shown = _within(after, [(top - each) ** 2 for each in off])
        if shown:
            how = [SpectralCap("exact", math.inf)] * len(shown)
            keep([left[index] for index in shown], clipped[shown], how)
    return caps


class _Grams(NamedTuple):
    """Matrices G within ``rounding`` of ``X^T X`` of each X of a batch, and ``|X|_F``."""

    gram: Tensor
    rounding: list[float]
    size: list[float]

    def of(self, places: list[int]) -> _Grams:
        """Those of some of the matrices."""
        return _Grams(
            self.gram[places], *([values[place] for place in places] for values in self[1:])
        )


def _measure(point: Tensor) -> _Grams:
    rows, columns = point.shape[-2:]
    terms = _worst_sum(rows)
    if point.dtype != torch.float64 and terms * columns * _unit(torch.float32) > _LOOSE:
        point = point.double()
    gram = symmetric_product(point.mT, point)
    size = torch.linalg.vector_norm(point, dim=(-2, -1)).double() * (
        1.0 + rows * columns * _unit(point.dtype)
    )
    rounding = terms * _unit(point.dtype) * size * size
    return _Grams(gram, rounding.tolist(), size.tolist())


def _within(grams: _Grams, wanted: list[float]) -> list[int]:
    """Return the places of the matrices for which ``|X|_2^2 <= wanted`` is proved.

    A factorisation of L I - G that runs to its end proves that no eigenvalue of it is below minus
    its rounding. It is not tried where a column of G is longer than L.
    """
    limits = torch.tensor(wanted, dtype=torch.float64)
    longest = torch.linalg.vector_norm(grams.gram, dim=-2).amax(-1).double().cpu()
    open_ = torch.nonzero(longest <= limits * (1.0 + _SLACKS[0])).flatten().tolist()
    if not open_:
        return []
    some = grams if len(open_) == len(limits) else grams.of(open_)
    shown = _has_factor(some.gram, limits[open_] - _slack(some, limits[open_]))
    return [place for place, is_shown in zip(open_, shown.tolist(), strict=True) if is_shown]


def _slack(grams: _Grams, shift: Tensor) -> Tensor:
    """Return what the rounding of a factorisation of ``shift I - G``, and that of G, may hide."""
    trace = grams.gram.diagonal(dim1=-2, dim2=-1).sum(-1).double().cpu()
    return torch.tensor(grams.rounding, dtype=torch.float64) + _factor_slack(
        grams.gram, shift, trace
    )


def _factor_slack(gram: Tensor, shift: Tensor, trace: Tensor) -> Tensor:
    columns = gram.shape[-1]
    return 1.1 * (columns + 4) * _unit(gram.dtype) * torch.maximum(columns * shift - trace, shift)


def _top_quotients(gram: Tensor) -> Tensor:
    """Return ``v^T G v / v^T v`` of each matrix for the last of its Ritz vectors, in float64 on the
    CPU."""
    vectors = ritz_vectors(gram, _LANCZOS)[..., -1:].to(gram)
    return (
        (((gram @ vectors) * vectors).sum((-2, -1)) / vectors.square().sum((-2, -1))).double().cpu()
    )


def _strengths(grams: _Grams, top: float, unit: float) -> list[tuple[float, float] | None]:
    """Return an a with ``|X (I - a G^4)|_2 <= top`` of each X, and the limit of ``|X^T X|_2`` that is
    proved for it; None where X is not near enough."""
    columns = grams.gram.shape[-1]
    found: list[tuple[float, float] | None] = [None] * len(grams.size)
    below = _top_quotients(grams.gram)
    for share in _SLACKS:
        shift = below * (1.0 + share)
        limits = (shift + _slack(grams, shift)).clamp_min(top * top).tolist()
        guessed = [
            None if known is not None else _strength(*bounds, columns=columns, unit=unit, top=top)
            for known, *bounds in zip(found, grams.rounding, limits, grams.size, strict=True)
        ]
        tried = {place: strength for place, strength in enumerate(guessed) if strength is not None}
        if tried:
            shown = _has_factor(grams.gram[list(tried)], shift[list(tried)]).tolist()
            for (place, strength), is_shown in zip(tried.items(), shown, strict=True):
                found[place] = (strength, limits[place]) if is_shown else None
    return found


def _has_factor(gram: Tensor, shift: Tensor) -> Tensor:
    """Whether ``shift I - G`` has a Cholesky factor, for each matrix."""
    shifted = -gram
    shifted.diagonal(dim1=-2, dim2=-1).add_(shift.to(gram)[:, None])
    return torch.linalg.cholesky_ex(shifted).info.cpu() == 0


def _strength(
    rounding: float, limit: float, own: float, *, columns: int, unit: float, top: float
) -> float | None:
    """Return a with ``|X (I - a G^4)|_2 <= top``, rounding included, or None where X is too large.

    It is known that ``|X^T X|_2 <= limit``, ``|X|_F = own``, and that G is within ``rounding`` of ``X^T X``.

    The error of each product is followed in the Frobenius norm, where that of A B is at most ``g
    |A|_F |B|_F``; of the powers of G it is ``|G^k|_F <= limit^(k - 1/2) |X|_F``, as no eigenvalue
    exceeds the limit and their sum is |X|_F^2.
    """
    g = _worst_sum(columns) * unit
    length = math.sqrt(limit)
    error = rounding + unit * (length * own + rounding)
    size = length * own + error
    error = 2.0 * limit * error + error * error + g * size * size
    size = length**3 * own + error
    error = 2.0 * limit**2 * error + error * error + g * size * size
    # The strength multiplies G^4, which rounds once more.
    error = length * error + (g + unit) * own * (length**7 * own + error)
    slope = length**9 - error
    strength = (
        (length - top + (columns / PIECE + 10) * unit * own) / slope if slope > 0.0 else math.inf
    )
    # Beyond, s - a s^9 would not grow up to the largest s.
    return strength if 9.0 * strength * length**8 <= 1.0 else None


def _bent(point: Tensor, gram: Tensor, strengths: Sequence[float]) -> Tensor:
    """Return ``X (I - a G^4)``, each matrix with its own a."""
    square = gram.to(point)
    square = symmetric_product(square, square)
    fourth = symmetric_product(square, square)
    fourth *= -torch.tensor(strengths, dtype=point.dtype, device=point.device)[:, None, None]
    return add_product_(point.clone(), point, fourth)


def _worst_sum(terms: int) -> float:
    """Return how many roundings a sum of so many products, made in pieces, may carry."""
    return 1.1 * (min(terms, PIECE) + terms / PIECE + 8)


def _clipped(point: Tensor, grams: _Grams, top: float) -> Tensor:
    """Return the matrices with every singular value above about ``top`` set to it, by eigenvectors
    of G.

    They end as far below as rounding hides from a proof, so that one of ``top`` is found.
    """
    values, vectors = torch.linalg.eigh(grams.gram)
    count = int((values > top * top * (1.0 - _SLACKS[0])).sum(-1).max())
    vectors = vectors[..., -max(1, count) :].to(point)
    after = values.clamp(0.0, top * top).sum(-1).double().cpu()
    own = _worst_sum(point.shape[-2]) * _unit(grams.gram.dtype) * after
    hidden = (
        1.5 * (own + _factor_slack(grams.gram, torch.ones_like(after), after))
        + 8.0 * _unit(point.dtype) * after
    )
    goal = (top * top - hidden.clamp_max(_SLACKS[0]).to(point)).sqrt()[:, None, None]
    images = point @ vectors
    lengths = torch.linalg.vector_norm(images, dim=-2, keepdim=True)
    return torch.baddbmm(
        point, images * (1.0 - goal / lengths.maximum(goal)), vectors.mT, alpha=-1.0
    )


def _proved(value: Tensor, dtype: torch.dtype, bound: float) -> Tensor:
    """Return the batch in ``dtype``, each matrix shrunk until the rounded one is proved to be
    inside."""
    for attempt in range(_MAX_TRIES):
        rounded = value.to(dtype)
        reached = certified_spectral_norm(rounded, method="cholesky")
        is_outside = reached > bound
        if not bool(is_outside.any()):
            return rounded
        shrink = bound / reached * (1.0 - 2.0 ** (attempt - _MAX_TRIES))
        value = value * torch.where(is_outside, shrink, 1.0)[:, None, None]
    raise ConvergenceError(
        f"cap_spectral_norm_: {tuple(value.shape[1:])} entries of {dtype} cannot be rounded into"
        f" |W|_2 <= {bound:g}"
    )


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2
