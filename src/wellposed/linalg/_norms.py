"""Norms of tokens, and operator norms from above: every number here is at least the true norm,
rounding included.

Power iteration is nowhere in this file: it approaches the norm from below, so it cannot certify.
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
# How many times the usual Lanczos steps, and the relative slack of the squared norm, tried in turn;
# (1 + 1.8e-4)^(1/2) keeps a norm within 1e-4.
_CHOLESKY_TRIES = ((1, (2e-5, 1.8e-4)), (3, (1.8e-4,)))
# Lanczos in float32 stops where a step adds this little: some units of its rounding.
_NOTHING_NEW = 3e-6
# Products are summed in pieces of this many terms, which keeps the worst rounding of long sums
# small, and symmetric ones made in panels of so many rows.
PIECE = 128
_PANEL = 96
# Columns of a Cholesky factor that LAPACK makes at once, and of a whole one in float32; between
# them are products. Rows a power of two apart share lines of the cache, which makes it half as fast.
_FACTOR_BLOCK, _WHOLE_FACTOR, _APART = 64, 256, 8
# Above this side a CPU multiplies matrices and vectors one by one at an eighth of the time of a
# batch.
_ONE_BY_ONE = 64


def check_norm(norm: object) -> Norm:
    """Return ``norm`` where it is one of ``"tok"``, ``"inf"``, ``2``, else raise `ConfigError`."""
    if norm == "sum":
        raise ConfigError("norm 'sum': no bound is proved in it here; known: 'tok', 'inf', 2")
    return check_token_norm(norm)  # type: ignore[return-value]


def check_token_norm(norm: object) -> TokenNorm:
    """Return ``norm`` where it is one of ``"tok"``, ``"inf"``, ``2``, ``"sum"``, else raise
    `ConfigError`."""
    if isinstance(norm, bool) or norm not in (*NORMS, "sum"):
        raise ConfigError(
            f"unknown norm {norm!r}; known: 'tok' (max over tokens of the 2-norm), 'inf', 2"
            " (Frobenius), and for certify and attacks 'sum' (of the tokens' 2-norms)"
        )
    return norm  # type: ignore[return-value]


@dataclass(frozen=True)
class Bound:
    """An upper bound (0-dim tensor, which carries gradient where the weights do) and the name of
    the proved form."""

    value: Tensor
    form: str


def least(bounds: Sequence[Bound]) -> Bound:
    """Return the smallest of several proved bounds; the first wins a tie."""
    return min(bounds, key=lambda bound: float(bound.value.detach()))


def certified_spectral_norm(weight: Tensor, *, method: SpectralMethod = "svd") -> Tensor:
    """Return an upper bound of ``|W|_2``, the largest singular value, for every matrix of a batch.

    Certified for the weights as stored (any dtype, denormal numbers included), rounding of this
    computation included, whatever precision float32 products are set to.
    ``"svd"``: largest singular value in float64 (a direct eigensolver on the small Gram matrix)
    times ``1 + 1e-6``, for certificates. ``"cholesky"``: a Lanczos vector v gives ``q = |W v| / |v|
    <= |W|_2``; a Cholesky factor of ``s^2 I - W^T W`` proves ``|W|_2 < s`` for an s within 1e-4 of
    q (else as ``"svd"``). So ``|W|_2 <= s <= (1 + 1e-4)
    |W|_2`` for every spectrum, many equal singular values included; faster than ``"svd"`` for wide matrices, not
    differentiable. ``"gram"``: differentiable, for training (`gram_iteration_norm`).

    Args:
        weight: ``(..., m, n)`` real floating, finite. Integers are refused (they are quantised
            weights more often than not, whose scale is elsewhere), complex numbers too.
        method: see above.

    Returns:
        ``(...)`` upper bounds; float64 for ``"svd"`` and ``"cholesky"``, else the computing dtype
        (at least float32).

    Raises:
        ShapeError: fewer than two dimensions.
        ConfigError: unknown method; complex, integer or bool weights.
        NotLipschitzError: the weight holds NaN or infinity.

    Cost: svd O(m n min(m, n)) in float64. Not for use inside a compiled training step: there take
    ``"gram"``.

    >>> W = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    >>> bool(4 <= certified_spectral_norm(W) < 4.0001)
    True
    """
    methods = {"svd": _svd_norm, "cholesky": _cholesky_norm, "gram": gram_iteration_norm}
    if method not in methods:
        raise unknown_name("spectral norm method", str(method), methods)
    return methods[method](weight)


def gram_iteration_norm(weight: Tensor, *, iterations: int = 8) -> Tensor:
    """Return ``b >= |W|_2`` with ``b <= |W|_2 rank^(1/2^(iterations+1))`` up to rounding, by Gram
    iteration.

    Certified, rounding included, and differentiable. ``G_0 = W``, ``G_(k+1) = G_k^T G_k``
    (rescaled), and ``|W|_2 <= |G_k|_F^(1/2^k)`` (Delattre, Barthelemy, Araujo, Allauzen, 2023,
    Theorem 1). Rounding is carried
    backwards: ``|A|_2^2 <= |fl(A^T A)|_2 + gamma |A|_F^2`` at each step.

    Args:
        weight: ``(..., m, n)`` real, finite. Half precision is computed in float32, other dtypes in
            their own.
        iterations: Gram products; 8 give a bound within 1.3 % at rank 512, to which float32 adds up
            to 6 % of rounding allowance (orthogonal 512 x 512) and float64 nothing visible.

    Returns:
        ``(...)`` upper bounds in the computing dtype.

    Raises:
        ShapeError, ConfigError, NotLipschitzError: as `certified_spectral_norm`.

    Cost: one m n min(m,n) product, then ``iterations - 1`` of min(m,n)^3. When the gradient is not
    needed and the tightest value is, use ``certified_spectral_norm(W, method="svd")``.

    >>> W = torch.diag(torch.tensor([3.0, 4.0]))
    >>> bool(4 <= gram_iteration_norm(W) < 4.02)
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
    # Gradients may be rounded as they like; only the value is certified.
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
    """Return ``|W|_inf = max_i sum_j |W_ij|``, the inf-norm of ``x -> W x`` (for `nn.Linear`, of
    its ``weight``).

    Exact up to float64 rounding, which is added. ``(..., m, n) -> (...)``, float64 for float64 or
    detached input of any dtype. Differentiable.

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
    # Squaring halves the digits of small singular values only; the largest keeps its relative
    # accuracy.
    return _rescaled(
        torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0).sqrt() * (1 + SVD_MARGIN), outer
    )


def _cholesky_norm(weight: Tensor) -> Tensor:
    matrix = wide_enough(weight.detach(), dtype=torch.float64)
    if matrix.numel() == 0 or min(matrix.shape[-2:]) < _CHOLESKY_FROM:
        return _svd_norm(weight.detach())
    flat = matrix.reshape(-1, *matrix.shape[-2:])
    grams, outers = scaled_gram(flat, by_panels=True)
    # The factor proves a bound whatever was guessed; the guess is guarded so that the bound is the
    # same every time.
    with full_precision(matrix.device.type):
        squares = torch.stack([_gram_norm(gram) for gram in grams])
    return _rescaled(squares.sqrt() * (1 + SVD_MARGIN), outers).reshape(matrix.shape[:-2])


def _gram_norm(gram: Tensor) -> Tensor:
    """Upper bound of the largest eigenvalue of a positive semi-definite matrix, proved by a
    Cholesky factor.

    A factorisation that runs to completion shows that the smallest eigenvalue exceeds minus ``n u``
    times the trace (Rump, 2006), which `SVD_MARGIN` covers.
    """
    for times, slacks in _CHOLESKY_TRIES:
        # A step costs size^2, a factor that fails size^3: with the size, more steps are worth it.
        below = _rayleigh_quotient(gram, times * (16 + len(gram) // 16)).clamp_min(
            torch.finfo(gram.dtype).tiny
        )
        for slack in slacks:
            candidate = below * (1 + slack)
            if bool(has_factor(gram[None], candidate[None])):
                return candidate
    return torch.linalg.eigvalsh(gram)[-1]


def _rayleigh_quotient(gram: Tensor, steps: int) -> Tensor:
    """Return ``v^T G v / v^T v``, never above the largest eigenvalue, for v from Lanczos steps;
    deterministic."""
    # The vector may be rough, since its quotient is taken in the precision of the matrix.
    top = ritz_vectors(gram, steps)[:, -1].to(gram)
    return (top @ (gram @ top)) / top.square().sum()


def ritz_vectors(grams: Tensor, steps: int) -> Tensor:
    """Return (..., n, k) float32 vectors, orthonormal or zero, by rising ``v^T G v``: the last is
    near the top one.

    A matrix ends where what is new in a step is down to rounding: for a few distinct eigenvalues
    that is after as many steps, and vectors made of rounding would repeat earlier ones, so that
    their Ritz values are several times the truth.
    """
    side = grams.shape[-1]
    if grams.ndim == 3 and grams.device.type == "cpu" and side > _ONE_BY_ONE:
        return torch.stack([ritz_vectors(gram, steps) for gram in grams])
    largest = grams.diagonal(dim1=-2, dim2=-1).amax(-1).clamp_min(torch.finfo(grams.dtype).tiny)
    rough = (grams / largest[..., None, None]).float()
    # The sine of squares looks random: it has a share in every structured eigenvector, such as ones
    # or a few entries.
    start = (
        torch.arange(1, side + 1, dtype=torch.float64, device=grams.device).square().sin().to(rough)
    )
    vector = start[:, None].expand(*rough.shape[:-1], 1)
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


def scaled_gram(matrix: Tensor, *, by_panels: bool = False) -> tuple[Tensor, Tensor]:
    """Return the smaller Gram matrix of ``W / m`` and ``m``, a magnitude chosen so that squares
    keep their digits."""
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
    """Return ``left @ right``, a batch known to be symmetric, multiplied up to the diagonal and
    mirrored: down to half the work; no gradient. A GPU, which waits for launches, takes it whole."""
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
    first, begin = left[..., :PIECE], right[..., :PIECE, :]
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
    """Bound the rounding error of `has_factor`, as a part of the trace of the matrix (Rump 2006)."""
    size, (dtype, block) = gram.shape[-1], _factored(gram)
    return (rounded_sums(size, block) + (block if block < size else 0)) * torch.finfo(dtype).eps / 2


def _factored(gram: Tensor) -> tuple[torch.dtype, int]:
    """In which dtype, and how many columns at once, a factor is made: a GPU takes all in float64,
    which costs it little beside the launches of blocks."""
    size = gram.shape[-1]
    if gram.device.type != "cpu":
        return torch.float64, size
    is_whole = gram.dtype == torch.float32 and size <= _WHOLE_FACTOR
    return gram.dtype, size if is_whole else _FACTOR_BLOCK


def has_factor(gram: Tensor, shift: Tensor) -> Tensor:
    """Whether ``shift I - G`` has a Cholesky factor, for each matrix of a batch, and again if there
    are as many shifts twice.

    A CPU makes large ones in blocks, whose products are faster than LAPACK and whose sums are
    shorter. The factor is that of a matrix within `factor_rounding` of its trace.
    """
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
    """Return the largest power of two not above each magnitude, denormal numbers included; 1 for 0,
    inf and NaN.

    Dividing by it is exact, so that products of what remains neither overflow nor underflow.

    >>> power_of_two(torch.tensor([5.0, 0.25, 0.0])).tolist()
    [4.0, 0.25, 1.0]
    """
    magnitude = magnitude.detach()
    usable = torch.isfinite(magnitude) & (magnitude > 0)
    magnitude = torch.where(usable, magnitude, 1.0)
    return magnitude / (2 * torch.frexp(magnitude).mantissa)


def unit_scaled(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``W / m`` and ``m`` (...), the power of two of the largest entry, 0 for a zero matrix.

    For autograd m is a constant: norms are homogeneous, so the gradient is unchanged.
    """
    largest = matrix.detach().abs().amax((-2, -1))
    outer = power_of_two(largest)
    return matrix / outer[..., None, None], torch.where(largest > 0, outer, 0.0)


def _rescaled(bound: Tensor, outer: Tensor) -> Tensor:
    """Return ``bound * outer``, which is rounded up where it is denormal: there no relative margin
    helps."""
    least = torch.finfo(bound.dtype).smallest_normal * torch.finfo(bound.dtype).eps
    return bound * outer + (outer > 0) * torch.full_like(bound, least)


def _frobenius(matrix: Tensor) -> Tensor:
    """Frobenius norm, kept above zero so that a zero matrix divides and differentiates cleanly,
    rounding added."""
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
            f" {tuple(weight.shape)}; of a complex W take [[Re W, -Im W], [Im W, Re W]], which has"
            " its norm, of integers their dequantised floating values"
        )
    if dtype is None:
        dtype = weight.dtype if weight.dtype in (torch.float32, torch.float64) else torch.float32
    matrix = weight.to(dtype)
    # One finite sum proves all entries finite, at a tenth of the cost of looking at each.
    if not (bool(torch.isfinite(matrix.detach().sum())) or bool(torch.isfinite(matrix).all())):
        bad = int((~torch.isfinite(matrix)).sum())
        raise NotLipschitzError(
            f"spectral norm: {bad} of {weight.numel()} entries of a {tuple(weight.shape)} weight"
            " are NaN or infinite, so the map has no Lipschitz constant; look for the step at"
            " which training diverged"
        )
    return matrix
