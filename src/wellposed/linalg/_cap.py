"""The largest singular value held below a bound, with a proof in place of a trust in convergence."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from wellposed.errors import ConfigError, ConvergenceError, ShapeError
from wellposed.linalg._norms import SVD_MARGIN, _gram_by_blocks, _rayleigh_quotient, certified_spectral_norm
from wellposed.linalg._polar import compute_dtype, full_precision, tall

CapMethod = Literal["inside", "polynomial", "exact"]
# Room below the bound, so that `certified_spectral_norm` of the result, margin included, is at most the bound.
_ROOM = 3 * SVD_MARGIN
# Singular values beyond this many bounds are outside what the polynomial can take.
_NEAR = 1.25
# Lanczos steps, and the slacks of the squared norm that are tried above their lower estimate.
_LANCZOS = 16
_SLACKS = (1e-2, 5e-2)
# A proof in float32 may be this loose (in the squared norm); beyond, it is made in float64.
_LOOSE = 4e-2
# Products are summed in pieces of this many terms, which keeps the worst rounding of long sums small.
_PIECE = 128
_PANEL = 192
_MAX_TRIES = 16


class SpectralCap(NamedTuple):
    """What `cap_spectral_norm_` did, and the proved bound on ``|W|_2`` that it found before."""

    method: CapMethod
    before: float


def cap_spectral_norm_(weight: Tensor, *, bound: float = 1.0) -> SpectralCap:
    """Change W as little as is cheap so that ``|W|_2 <= bound``; a W proved to be inside is not touched.

    Status: certified for the matrix as stored, rounding included: a Cholesky factor of ``L I - W^T W / bound^2`` proves
    ``|W|_2 <= l bound``, ``l = sqrt L`` (Rump 2006). Where l is below about 1.12, ``W (I - a (W^T W / bound^2)^4)`` is
    taken: every singular value s becomes ``s - a s^9``, which grows on [0, l] and ends at 1 less the rounding of its
    products, bounded a priori; a singular value of half the bound moves by ``a / 512``, ``a <= l - 1``. For larger l
    every singular value above the bound is set to it (float64 eigenvectors, the nearest such matrix in the Frobenius
    norm), and the stored result is proved anew, which may shrink it by 1e-4, as is every half-precision one. Source:
    `wellposed`; soft caps by odd polynomials are of Newhouse et al. (2025, arXiv 2507.13338), without a proof. Power
    iteration is nowhere.

    Args:
        weight: (rows, columns), floating, changed in place; may be a view.
        bound: above 0.

    Returns:
        `SpectralCap`.

    Raises:
        ConvergenceError: W is not finite; it is left as it was. ShapeError: not a matrix. ConfigError: bound not above
            0, or not finite.

    Cost: in products of W with its Gram matrix, float32 at 512 x 512 on a CPU: 2 where W is inside, 6 with the
    polynomial, about 35 with eigenvectors. When not to use: where a weight is measured only now and
    then, `certified_spectral_norm` and a division do.

    >>> import torch
    >>> weight = torch.diag(torch.tensor([1.05, 0.5]))
    >>> cap_spectral_norm_(weight).method, bool(torch.linalg.matrix_norm(weight, 2) <= 1)
    ('polynomial', True)
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ShapeError(
            f"cap_spectral_norm_: expected a floating matrix (rows, columns), received {weight.dtype} "
            f"{tuple(weight.shape)}"
        )
    if not 0.0 < bound < math.inf:
        raise ConfigError(f"cap_spectral_norm_: bound must be above 0 and finite, received {bound!r}")
    if weight.numel() == 0:
        return SpectralCap("inside", 0.0)
    target = tall(weight.detach())
    with torch.no_grad(), full_precision(weight.device.type):
        size = float(torch.linalg.vector_norm(target, dtype=torch.float64)) / bound
        if size <= 1.0 - _ROOM:
            return SpectralCap("inside", size * bound * (1.0 + SVD_MARGIN))
        if not math.isfinite(size) and not bool(torch.isfinite(target).all()):
            raise ConvergenceError(f"cap_spectral_norm_: the {tuple(weight.shape)} matrix is not finite")
        return _cap_(target, bound, size)


def _cap_(target: Tensor, bound: float, size: float) -> SpectralCap:
    top = 1.0 - _ROOM
    if size > _NEAR * math.sqrt(target.shape[1]):  # the root mean square of the singular values is far outside
        _store_proved_(target, _clipped(target, bound * top), bound)
        return SpectralCap("exact", size * bound * (1.0 + SVD_MARGIN))
    proof = _prove(target, bound, size, top * top)
    before = math.sqrt(proof.limit) * bound
    if proof.limit <= top * top:
        return SpectralCap("inside", before)
    is_half = target.dtype not in (torch.float32, torch.float64)
    if is_half:
        top -= torch.finfo(target.dtype).eps
    point = target.to(compute_dtype(target)) / bound
    capped = _polynomial(point, proof, top)
    if capped is None:
        _store_proved_(target, _clipped(target, bound * top), bound)
        return SpectralCap("exact", before)
    if is_half:
        _store_proved_(target, capped.double() * bound, bound)
    else:
        target.copy_(capped.mul_(bound))
    return SpectralCap("polynomial", before)


class _Proof(NamedTuple):
    """G is within ``rounding`` (2-norm) of ``X^T X``, whose eigenvalues ``limit`` bounds; ``|X|_F`` is ``size``."""

    gram: Tensor
    rounding: float
    limit: float
    size: float


def _prove(target: Tensor, bound: float, size: float, wanted: float) -> _Proof:
    """Bound the squared norm of ``X = W / bound``, by ``wanted`` where that can be shown."""
    rows, columns = target.shape
    is_float32_enough = target.dtype != torch.float64 and (rows + 8) * columns * _unit(torch.float32) <= _LOOSE
    point = target.to(torch.float32 if is_float32_enough else torch.float64) / bound
    gram = _gram_by_blocks(point.mT)
    rounding = 1.1 * (rows + 8) * _unit(point.dtype) * size * size
    return _Proof(gram, rounding, _proved_limit(gram, rounding, wanted), size)


def _proved_limit(gram: Tensor, rounding: float, wanted: float) -> float:
    """Return ``wanted`` if it is proved to be at least the largest eigenvalue, or else a proved bound above it."""
    columns = len(gram)
    trace = float(gram.trace())
    own = 1.1 * (columns + 4) * _unit(gram.dtype)
    # A factorisation of L I - G that runs to its end proves that no eigenvalue of it is below minus its rounding.
    if _has_factor(gram, wanted - rounding - own * max(columns * wanted - trace, wanted)):
        return wanted
    below = float(_rayleigh_quotient(gram, _LANCZOS))
    for slack in _SLACKS:
        shift = below * (1.0 + slack)
        limit = shift + rounding + own * max(columns * shift - trace, shift)
        if limit > wanted and _has_factor(gram, shift):
            return limit
    exact = float(torch.linalg.eigvalsh(gram.double())[-1]) * (1.0 + SVD_MARGIN) + rounding
    return max(exact, math.nextafter(wanted, math.inf))


def _has_factor(gram: Tensor, shift: float) -> bool:
    """Whether ``shift I - G`` has a Cholesky factor."""
    shifted = -gram
    shifted.diagonal().add_(shift)
    return int(torch.linalg.cholesky_ex(shifted).info) == 0


def _polynomial(point: Tensor, proof: _Proof, top: float) -> Tensor | None:
    """Return ``X (I - a G^4)``, all of it at most ``top`` in the 2-norm, rounding included; None where X is too large.

    The error of each product is followed in the Frobenius norm, where that of A B is at most ``g |A|_F |B|_F``; of the
    powers of G it is ``|G^k|_F <= limit^(k - 1/2) |X|_F``, as no eigenvalue exceeds the limit and their sum is |X|_F^2.
    """
    unit, limit, gram = _unit(point.dtype), proof.limit, proof.gram.to(point)
    columns = len(gram)
    g = 1.1 * (_PIECE + columns / _PIECE + 8) * unit
    length = math.sqrt(limit)
    error = proof.rounding + unit * (length * proof.size + proof.rounding)
    size = length * proof.size + error
    squared = _square(gram)
    error = 2.0 * limit * error + error * error + g * size * size
    size = length**3 * proof.size + error
    fourth = _square(squared)
    error = 2.0 * limit**2 * error + error * error + g * size * size
    error = length * error + g * proof.size * (length**7 * proof.size + error)
    slope = length**9 - error
    strength = (length - top + (columns / _PIECE + 10) * unit * proof.size) / slope if slope > 0.0 else math.inf
    if 9.0 * strength * length**8 > 1.0:  # s - a s^9 would not grow up to the largest s
        return None
    return _by_pieces(point, point.clone(), fourth, alpha=-strength)


def _square(symmetric: Tensor) -> Tensor:
    """Return the square of a symmetric matrix, multiplied up to the diagonal and mirrored."""
    size = len(symmetric)
    out = torch.zeros_like(symmetric)
    for start in range(0, size, _PANEL):
        rows = slice(start, start + _PANEL)
        _by_pieces(out[rows, : start + _PANEL], symmetric[rows], symmetric[:, : start + _PANEL])
        out[:start, rows] = out[rows, :start].mT
    return out


def _by_pieces(out: Tensor, left: Tensor, right: Tensor, *, alpha: float = 1.0) -> Tensor:
    """Add ``alpha * left @ right`` to ``out`` in sums of `_PIECE` terms."""
    for start in range(0, len(right), _PIECE):
        piece = slice(start, start + _PIECE)
        out.addmm_(left[:, piece], right[piece], alpha=alpha)
    return out


def _clipped(target: Tensor, limit: float) -> Tensor:
    """Return the matrix in float64 with every singular value above ``limit`` set to it."""
    scale = float(target.abs().amax())
    point = target.double() / scale  # no square overflows
    vectors = torch.linalg.eigh(_gram_by_blocks(point.mT)).eigenvectors
    images = point @ vectors
    lengths = torch.linalg.vector_norm(images, dim=0)
    is_outside = lengths > limit / scale
    excess = images[:, is_outside] * (1.0 - limit / scale / lengths[is_outside])
    return (point - excess @ vectors[:, is_outside].mT) * scale


def _store_proved_(target: Tensor, value: Tensor, bound: float) -> None:
    """Write ``value`` in the dtype of ``target``, shrunk until the written matrix is proved to be inside."""
    for attempt in range(_MAX_TRIES):
        target.copy_(value)
        reached = float(certified_spectral_norm(target, method="cholesky"))
        if reached <= bound:
            return
        value = value * (bound / reached * (1.0 - 2.0 ** (attempt - _MAX_TRIES)))
    raise ConvergenceError(
        f"cap_spectral_norm_: {tuple(target.shape)} entries of {target.dtype} cannot be rounded into |W|_2 <= {bound:g}"
    )


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2
