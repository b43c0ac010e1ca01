"""Norms of tokens, and operator norms from above: at least the true norm, rounding included.

Power iteration is not used here: it approaches the norm from below, so it cannot certify.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.errors import ConfigError, NotLipschitzError, ShapeError, unknown_name
from wellposed.linalg._tensors import full_precision

Norm = Literal["tok", "inf", 2]
TokenNorm = Literal["tok", "inf", 2, "sum"]
"""Norms of the tokens of a sequence: ``"sum"``, of their 2-norms, has bounds of fewer maps."""
NORMS: tuple[Norm, ...] = ("tok", "inf", 2)
SpectralMethod = Literal["svd", "cholesky", "gram"]
# Covers the backward error of a float64 SVD, O(n) * 1e-16 relative to the largest singular value,
# with room to spare.
SVD_MARGIN = 1e-6
# Below this side the eigensolver is as fast as a Cholesky factor.
_CHOLESKY_FROM = 192
# Multiples of the usual Lanczos steps, and relative slacks of the squared norm, tried in turn.
# (1 + 1.8e-4)^(1/2) keeps a norm within 1e-4.
_CHOLESKY_TRIES = ((1, (2e-5, 1.8e-4)), (3, (1.8e-4,)))
# Lanczos in float32 stops if a step adds at most this: some units of its rounding. Later vectors
# would be rounding alone, and their Ritz values several times the truth.
_NOTHING_NEW = 3e-6
# Products are summed in pieces of this many terms, for small rounding errors of long sums, and
# symmetric ones are computed in panels of _PANEL rows.
PIECE = 128
_PANEL = 96
# Columns of a Cholesky factor that LAPACK computes at once, of which float32 allows more. Products
# connect the blocks. Rows a power of two apart share cache lines: half the speed.
_FACTOR_BLOCK = 64
_WHOLE_FACTOR = 256
_APART = 8
# Above this side a CPU needs an eighth of the time without batches of matrix-vector products.
_ONE_BY_ONE = 64


def check_norm(norm: object) -> Norm:
    """Return ``norm`` if it is ``"tok"``, ``"inf"`` or ``2``, else raise `ConfigError`."""
    if norm == "sum":
        raise ConfigError("norm 'sum': no bound is proved in it here; known: 'tok', 'inf', 2")
    return check_token_norm(norm)  # type: ignore[return-value]


def check_token_norm(norm: object) -> TokenNorm:
    """Return ``norm`` if it is one of `check_norm` or ``"sum"``, else raise `ConfigError`."""
    if isinstance(norm, bool) or norm not in (*NORMS, "sum"):
        raise ConfigError(
            f"unknown norm {norm!r}; known: 'tok' (max over tokens of the 2-norm), 'inf', 2"
            " (Frobenius), and for certify and attacks 'sum' (of the tokens' 2-norms)"
        )
    return norm  # type: ignore[return-value]


@dataclass(frozen=True)
class Bound:
    """An upper bound (0-dim tensor, with gradient if the weights have one) and its proved form."""

    value: Tensor
    form: str


def smallest_bound(bounds: Sequence[Bound]) -> Bound:
    """Return the smallest of several proved bounds; the first wins a tie."""
    return min(bounds, key=lambda bound: float(bound.value.detach()))


def certified_spectral_norm(weight: Tensor, *, method: SpectralMethod = "svd") -> Tensor:
    """Return an upper bound of ``|W|_2``, the largest singular value, for every matrix of a batch.

    Status: certified for the weights as stored (any dtype, denormal numbers included), rounding of
    this computation included, at any precision setting of float32 products. ``"svd"`` (for
    certificates) is the largest singular value in float64, by an eigensolver on the small Gram
    matrix, times ``1 + 1e-6``. ``"cholesky"`` proves by a Cholesky factor a bound within 1e-4 of
    ``|W|_2`` for every spectrum, or falls back to ``"svd"``; it is faster for wide matrices and not
    differentiable. ``"gram"`` (for training) is differentiable: `gram_iteration_norm`.

    Args:
        weight: ``(..., m, n)`` real floating, finite. Complex weights are refused, and integers,
            which are mostly quantised weights with their scale elsewhere.
        method: see above; of ``"gram"`` the result has the computing dtype, else float64.

    Raises:
        ShapeError: fewer than two dimensions. NotLipschitzError: the weight holds NaN or infinity.
        ConfigError: unknown method; complex, integer or bool weights.

    Cost: svd O(m n min(m, n)) in float64. In a compiled training step use ``"gram"`` only.

    >>> bool(4 <= certified_spectral_norm(torch.diag(torch.tensor([3.0, 4.0]))) < 4.0001)
    True
    """
    methods = {"svd": _svd_norm, "cholesky": _cholesky_norm, "gram": gram_iteration_norm}
    if method not in methods:
        raise unknown_name("spectral norm method", str(method), methods)
    return methods[method](weight)


def gram_iteration_norm(weight: Tensor, *, iterations: int = 8) -> Tensor:
    """Return b, ``|W|_2 <= b <= |W|_2 rank^(1/2^(iterations+1))`` up to rounding.

    Status: certified, rounding included, and differentiable: ``|W|_2 <= |G_k|_F^(1/2^k)`` for ``G_0
    = W``, ``G_(k+1) = G_k^T G_k``. Source: Delattre, Barthelemy, Araujo, Allauzen, 2023, Theorem 1.

    Args:
        weight: ``(..., m, n)`` real, finite. Half precision is computed in float32.
        iterations: Gram products; 8 give a bound within 1.3 % at rank 512, to which float32 adds up
            to 6 % of rounding allowance (orthogonal 512 x 512) and float64 nothing visible.

    Raises:
        ShapeError, ConfigError, NotLipschitzError: as `certified_spectral_norm`.

    Cost: one m n min(m,n) product, then ``iterations - 1`` of min(m,n)^3. When not to use: if no
    gradient is needed, ``certified_spectral_norm(W, method="svd")`` is tighter.

    >>> bool(4 <= gram_iteration_norm(torch.diag(torch.tensor([3.0, 4.0]))) < 4.02)
    True
    """
    matrix = wide_enough(weight)
    if matrix.numel() == 0:
        return matrix.new_zeros(matrix.shape[:-2])
    if matrix.shape[-2] < matrix.shape[-1]:
        matrix = matrix.mT

    eps = torch.finfo(matrix.dtype).eps
    matrix, outer = unit_scaled(matrix)
    scales: list[Tensor] = []
    gammas: list[float] = []
    # Only the value is certified, not the gradient.
    with full_precision(matrix.device.type):
        for _ in range(iterations):
            norm = _frobenius(matrix)
            scales.append(norm)
            gammas.append(2 * (matrix.shape[-2] + 4) * eps)
            unit = matrix / norm
            matrix = unit.mT @ unit

    bound = _frobenius(matrix)
    for norm, gamma in zip(reversed(scales), reversed(gammas), strict=True):
        bound = norm * torch.sqrt(bound + gamma)
    return _rescaled(bound[..., 0, 0] * (1 + 64 * eps), outer)


def infinity_norm(weight: Tensor) -> Tensor:
    """Return ``|W|_inf = max_i sum_j |W_ij|``, the inf-norm of ``x -> W x``: (..., m, n) -> (...).

    Status: exact up to float64 rounding, which is added; in float64, differentiable.

    >>> float(infinity_norm(torch.tensor([[1.0, -2.0], [0.5, 0.5]])))  # doctest: +ELLIPSIS
    3.0000...
    """
    matrix = wide_enough(weight, dtype=torch.float64)
    if matrix.numel() == 0:
        return matrix.new_zeros(matrix.shape[:-2])
    return matrix.abs().sum(-1).amax(-1) * (
        1 + (matrix.shape[-1] + 4) * torch.finfo(torch.float64).eps
    )


def _svd_norm(weight: Tensor) -> Tensor:
    matrix = wide_enough(weight, dtype=torch.float64)
    if matrix.numel() == 0:
        return matrix.new_zeros(matrix.shape[:-2])
    gram, outer = scaled_gram(matrix)
    # Squaring halves the digits of small singular values; the largest keeps its accuracy.
    return _rescaled(
        torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0).sqrt() * (1 + SVD_MARGIN), outer
    )


def _cholesky_norm(weight: Tensor) -> Tensor:
    matrix = wide_enough(weight.detach(), dtype=torch.float64)
    if matrix.numel() == 0 or min(matrix.shape[-2:]) < _CHOLESKY_FROM:
        return _svd_norm(weight.detach())
    # (..., m, n) -> (batch, m, n)
    flat = matrix.reshape(-1, *matrix.shape[-2:])
    grams, outers = scaled_gram(flat, by_panels=True)
    # The factor proves a bound for any guess; the guess is deterministic so that the bound is too.
    with full_precision(matrix.device.type):
        squares = torch.stack([_gram_norm(gram) for gram in grams])
    return _rescaled(squares.sqrt() * (1 + SVD_MARGIN), outers).reshape(matrix.shape[:-2])


def _gram_norm(gram: Tensor) -> Tensor:
    """Return an upper bound of the largest eigenvalue, proved by a Cholesky factor (Rump, 2006)."""
    for times, slacks in _CHOLESKY_TRIES:
        # A step costs size^2 and a failed factor size^3, so larger matrices take more steps.
        below = _rayleigh_quotient(gram, times * (16 + len(gram) // 16)).clamp_min(
            torch.finfo(gram.dtype).tiny
        )
        for slack in slacks:
            candidate = below * (1 + slack)
            if bool(has_factor(gram[None], candidate[None])):
                return candidate
    return torch.linalg.eigvalsh(gram)[-1]


def _rayleigh_quotient(gram: Tensor, steps: int) -> Tensor:
    """Return a lower estimate of the largest eigenvalue by Lanczos steps; deterministic."""
    # The vector may be rough: the quotient is computed in the precision of the matrix.
    top = ritz_vectors(gram, steps)[:, -1].to(gram)
    return (top @ (gram @ top)) / top.square().sum()


def guess_largest_eigenvalue(matrices: Tensor) -> Tensor:
    """Return the largest eigenvalue (...,) of positive semidefinite matrices (..., n, n), no proof.

    Wide ones take Lanczos steps, from below and within 1e-10 for most spectra; others are exact.
    """
    side = matrices.shape[-1]
    if side < _CHOLESKY_FROM:
        return torch.linalg.eigvalsh(matrices)[..., -1]
    top = ritz_vectors(matrices, 16 + side // 16)[..., -1:].to(matrices)
    return (top.mT @ (matrices @ top) / top.square().sum((-2, -1), keepdim=True))[..., 0, 0]


def ritz_vectors(grams: Tensor, steps: int) -> Tensor:
    """Return (..., n, k) float32 vectors, orthonormal or zero, by rising ``v^T G v``."""
    side = grams.shape[-1]
    if grams.ndim == 3 and grams.device.type == "cpu" and side > _ONE_BY_ONE:
        return torch.stack([ritz_vectors(gram, steps) for gram in grams])

    largest = grams.diagonal(dim1=-2, dim2=-1).amax(-1).clamp_min(torch.finfo(grams.dtype).tiny)
    rough = (grams / largest[..., None, None]).float()
    vector = ritz_start(side, rough)[:, None].expand(*rough.shape[:-1], 1)
    basis = rough.new_zeros(*rough.shape[:-2], min(steps, side), side)
    projected = rough.new_zeros(*rough.shape[:-2], basis.shape[-2], basis.shape[-2])
    size = rough.new_zeros(*rough.shape[:-2], 1, 1)
    for step in range(basis.shape[-2]):
        length = torch.linalg.vector_norm(vector, dim=-2, keepdim=True)
        is_new = length > _NOTHING_NEW * size
        if not bool(is_new.any()):
            break
        unit = torch.where(is_new, vector / length, 0.0)
        basis[..., step, :] = unit[..., 0]
        image = rough @ unit
        inside = basis @ image
        projected[..., step, :] = inside[..., 0]
        size = torch.maximum(size, inside[..., step, None, :])
        vector = image - basis.mT @ inside
        vector = vector - basis.mT @ (basis @ vector)

    # Only the lower triangle was filled, and only it is read.
    return basis.mT @ torch.linalg.eigh(projected).eigenvectors


def ritz_start(count: int, like: Tensor) -> Tensor:
    """Return pseudo-random numbers, with a part in every structured vector (ones, or a few entries)."""
    places = torch.arange(1, count + 1, dtype=torch.float64, device=like.device)
    return places.square().sin().to(like)


def scaled_gram(matrix: Tensor, *, by_panels: bool = False) -> tuple[Tensor, Tensor]:
    """Return the smaller Gram matrix of ``W / m``, and m: squares keep their digits."""
    gram = _gram(matrix, by_panels=by_panels)
    diagonal = gram.detach().diagonal(dim1=-2, dim2=-1).amax(-1)
    if bool(((diagonal < 1e200) & (diagonal > 1e-200)).all()):
        return gram, torch.ones_like(diagonal)
    matrix, outer = unit_scaled(matrix)
    return _gram(matrix, by_panels=by_panels), outer


def _gram(matrix: Tensor, *, by_panels: bool) -> Tensor:
    wide = matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT
    return symmetric_product(wide, wide.mT) if by_panels else wide @ wide.mT


def symmetric_product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right`` of a batch known to be symmetric, without gradient.

    A CPU computes panels up to the diagonal and mirrors them: down to half the work.
    """
    size = right.shape[-1]
    panel = _PANEL if right.device.type == "cpu" else size
    if size <= panel:
        return product(left, right)
    out = right.new_zeros(*right.shape[:-2], size, size)
    for start in range(0, size, panel):
        end = min(start + panel, size)
        add_product_(out[:, start:end, :end], left[:, start:end], right[:, :, :end])
        out[:, :start, start:end] = out[:, start:end, :start].mT
    return out


def product(
    left: Tensor, right: Tensor, *, plus: Tensor | None = None, alpha: float = 1.0
) -> Tensor:
    """Return ``plus + alpha left @ right``, or ``left @ right``, in sums of `PIECE` terms."""
    first = left[..., :PIECE]
    begin = right[..., :PIECE, :]
    out = first @ begin if plus is None else torch.baddbmm(plus, first, begin, alpha=alpha)
    return add_product_(out, left[..., PIECE:], right[..., PIECE:, :], alpha=alpha)


def add_product_(
    out: Tensor, left: Tensor, right: Tensor, *, terms: int = PIECE, alpha: float = 1.0
) -> Tensor:
    """Add ``alpha left @ right`` to ``out`` in sums of so many terms."""
    for start in range(0, right.shape[-2], terms):
        piece = slice(start, start + terms)
        out.baddbmm_(left[..., piece], right[..., piece, :], alpha=alpha)
    return out


def rounded_sums(count: int, terms: int = PIECE) -> float:
    """Bound the rounding error of a sum of ``count`` products added up in pieces, in roundings."""
    return 1.1 * (min(count, terms) + count / terms + 8)


def factor_rounding(gram: Tensor) -> float:
    """Bound the rounding error of `has_factor`, as a part of the trace (Rump 2006)."""
    size = gram.shape[-1]
    dtype, block = _factored(gram)
    return (rounded_sums(size, block) + (block if block < size else 0)) * torch.finfo(dtype).eps / 2


def _factored(gram: Tensor) -> tuple[torch.dtype, int]:
    """Return the dtype and the block size of a factor; a GPU takes all at once in float64."""
    size = gram.shape[-1]
    if gram.device.type != "cpu":
        return torch.float64, size
    is_whole = gram.dtype == torch.float32 and size <= _WHOLE_FACTOR
    return gram.dtype, size if is_whole else _FACTOR_BLOCK


def has_factor(gram: Tensor, shift: Tensor) -> Tensor:
    """Whether ``shift I - G``, up to `factor_rounding`, has a factor, for each shift."""
    dtype, block = _factored(gram)
    is_split = gram.device.type == "cpu" and block == gram.shape[-1] and block % 128 == 0
    more = _APART if is_split else 0
    size = gram.shape[-1] + more
    block += more
    lower = -gram.to(dtype)
    if len(shift) > len(gram):
        lower = lower.repeat(len(shift) // len(gram), 1, 1)
    if more:
        lower = F.pad(lower, (0, more, 0, more))

    lower.diagonal(dim1=-2, dim2=-1).add_(shift.to(lower)[:, None])
    is_whole = None
    for start in range(0, size, block):
        end = min(start + block, size)
        panel = lower[:, start:, start:end]
        done = lower[:, start:, :start]
        add_product_(panel, done, done[:, : end - start].mT, terms=block, alpha=-1.0)
        corner, info = torch.linalg.cholesky_ex(panel[:, : end - start])
        is_whole = info == 0 if is_whole is None else is_whole & (info == 0)
        if end == size or not bool(is_whole.any()):
            return is_whole
        below = panel[:, end - start :]
        below.copy_(torch.linalg.solve_triangular(corner.mT, below, upper=True, left=False))
        panel[:, : end - start] = corner

    return torch.ones(len(shift), dtype=torch.bool, device=gram.device)


def power_of_two(magnitude: Tensor) -> Tensor:
    """Return the largest power of two not above each magnitude; 1 for 0, inf and NaN.

    >>> power_of_two(torch.tensor([5.0, 0.25, 0.0])).tolist()
    [4.0, 0.25, 1.0]
    """
    magnitude = magnitude.detach()
    usable = torch.isfinite(magnitude) & (magnitude > 0)
    magnitude = torch.where(usable, magnitude, 1.0)
    return magnitude / (2 * torch.frexp(magnitude).mantissa)


def unit_scaled(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``W / m``, and m: the largest entry's power of two (0 for zeros), no gradient."""
    largest = matrix.detach().abs().amax((-2, -1))
    outer = power_of_two(largest)
    return matrix / outer[..., None, None], torch.where(largest > 0, outer, 0.0)


def _rescaled(bound: Tensor, outer: Tensor) -> Tensor:
    """Return ``bound * outer``, rounded up if it is denormal: no relative margin helps there."""
    step = torch.finfo(bound.dtype).smallest_normal * torch.finfo(bound.dtype).eps
    return bound * outer + (outer > 0) * torch.full_like(bound, step)


def _frobenius(matrix: Tensor) -> Tensor:
    """Return the Frobenius norm, rounding added, above zero to divide and differentiate."""
    count = matrix.shape[-2] * matrix.shape[-1]
    info = torch.finfo(matrix.dtype)
    margin = 1 + 2 * (math.sqrt(count) + 8) * info.eps
    return (matrix.square().sum((-2, -1), keepdim=True) + info.tiny).sqrt() * margin


def wide_enough(weight: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Check the weight and return it in the computing dtype (never below float32)."""
    if weight.ndim < 2:
        raise ShapeError(
            f"spectral norm: expected a matrix (..., m, n), received shape {tuple(weight.shape)}"
        )
    if not weight.is_floating_point():
        raise ConfigError(
            f"spectral norm: expected a real floating weight, received {weight.dtype} of shape"
            f" {tuple(weight.shape)}. For a complex W use [[Re W, -Im W], [Im W, Re W]], which has"
            " its norm; dequantise integers"
        )

    if dtype is None:
        dtype = weight.dtype if weight.dtype in (torch.float32, torch.float64) else torch.float32
    matrix = weight.to(dtype)
    # A finite sum proves all entries finite, at a tenth of the cost of checking each.
    if not (bool(torch.isfinite(matrix.detach().sum())) or bool(torch.isfinite(matrix).all())):
        bad = int((~torch.isfinite(matrix)).sum())
        raise NotLipschitzError(
            f"spectral norm: {bad} of {weight.numel()} entries of a {tuple(weight.shape)} weight"
            " are NaN or infinite, so the map has no Lipschitz constant; look for the step at"
            " which training diverged"
        )

    return matrix
