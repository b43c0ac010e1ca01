"""Operator norms from above: every number here is at least the true norm, rounding included.

Power iteration is nowhere in this file: it approaches the norm from below, so it cannot certify.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from wellposed.errors import NotLipschitzError, ShapeError, unknown_name

SpectralMethod = Literal["svd", "cholesky", "gram", "interpolation"]
# Covers the backward error of a float64 SVD, O(n) * 1e-16 relative to the largest singular value, with room to spare.
SVD_MARGIN = 1e-6
# Below this side the eigensolver is as fast as a Cholesky factor.
_CHOLESKY_FROM = 192


def certified_spectral_norm(weight: Tensor, *, method: SpectralMethod = "svd") -> Tensor:
    """Return an upper bound of ``|W|_2``, the largest singular value, for every matrix of a batch.

    Certified for the weights as stored (any dtype), rounding of this computation included.
    ``"svd"``: largest singular value in float64 (a direct eigensolver on the small Gram matrix) times ``1 + 1e-6``, for
    certificates. ``"cholesky"``: a Lanczos estimate ``s`` enlarged until ``s^2 I - W^T W`` has a Cholesky factor, which
    proves ``|W|_2 < s`` within 1e-4; faster than ``"svd"`` for wide matrices, not differentiable.
    ``"gram"``: differentiable, for training (`gram_iteration_norm`). ``"interpolation"``: ``sqrt(|W|_1 |W|_inf)``.

    Args:
        weight: ``(..., m, n)`` real, finite.
        method: see above.

    Returns:
        ``(...)`` upper bounds; float64 for ``"svd"`` and ``"cholesky"``, else the computing dtype (at least float32).

    Raises:
        ShapeError: fewer than two dimensions.
        NotLipschitzError: the weight holds NaN or infinity.

    Cost: svd O(m n min(m, n)) in float64. Not for use inside a compiled training step: there take ``"gram"``.

    >>> W = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    >>> bool(4 <= certified_spectral_norm(W) < 4.0001)
    True
    """
    if method == "svd":
        return _svd_norm(weight)
    if method == "cholesky":
        return _cholesky_norm(weight)
    if method == "gram":
        return gram_iteration_norm(weight)
    if method == "interpolation":
        return interpolation_norm(weight)
    raise unknown_name("spectral norm method", str(method), ("svd", "cholesky", "gram", "interpolation"))


def gram_iteration_norm(weight: Tensor, *, iterations: int = 8) -> Tensor:
    """Return ``b >= |W|_2`` with ``b <= |W|_2 rank^(1/2^(iterations+1))`` up to rounding, by Gram iteration.

    Certified, rounding included, and differentiable. ``G_0 = W``, ``G_(k+1) = G_k^T G_k`` (rescaled), and
    ``|W|_2 <= |G_k|_F^(1/2^k)`` (Delattre, Barthelemy, Araujo, Allauzen, 2023, Theorem 1). Rounding is carried
    backwards: ``|A|_2^2 <= |fl(A^T A)|_2 + gamma |A|_F^2`` at each step.

    Args:
        weight: ``(..., m, n)`` real, finite. Half precision is computed in float32, other dtypes in their own.
        iterations: Gram products; 8 give a bound within 1.3 % at rank 512, to which float32 adds up to 6 % of rounding
            allowance (orthogonal 512 x 512) and float64 nothing visible.

    Returns:
        ``(...)`` upper bounds in the computing dtype.

    Raises:
        ShapeError: fewer than two dimensions.
        NotLipschitzError: the weight holds NaN or infinity.

    Cost: one m n min(m,n) product, then ``iterations - 1`` of min(m,n)^3. When the gradient is not needed and the
    tightest value is, use ``certified_spectral_norm(W, method="svd")``.

    >>> W = torch.diag(torch.tensor([3.0, 4.0]))
    >>> bool(4 <= gram_iteration_norm(W) < 4.02)
    True
    """
    matrix = _wide_enough(weight)
    if matrix.numel() == 0:
        return matrix.new_zeros(matrix.shape[:-2])
    if matrix.shape[-2] < matrix.shape[-1]:
        matrix = matrix.mT
    eps = torch.finfo(matrix.dtype).eps
    tiny = torch.finfo(matrix.dtype).tiny
    # The outer scale is a constant for autograd: the bound is homogeneous, so its gradient is unchanged.
    outer = matrix.detach().abs().amax((-2, -1), keepdim=True).clamp_min(tiny)
    matrix = matrix / outer
    scales: list[Tensor] = []
    gammas: list[float] = []
    for _ in range(iterations):
        norm = _frobenius(matrix)
        scales.append(norm)
        gammas.append(2 * (matrix.shape[-2] + 4) * eps)
        unit = matrix / norm
        matrix = unit.mT @ unit
    bound = _frobenius(matrix)
    for norm, gamma in zip(reversed(scales), reversed(gammas), strict=True):
        bound = norm * torch.sqrt(bound + gamma)
    return (bound * outer * (1 + 64 * eps))[..., 0, 0]


def interpolation_norm(weight: Tensor) -> Tensor:
    """Return ``sqrt(|W|_1 |W|_inf) >= |W|_2``: certified, differentiable, O(mn), usually loose by a small factor.

    >>> float(interpolation_norm(torch.eye(3)))  # doctest: +ELLIPSIS
    1.0000...
    """
    matrix = _wide_enough(weight)
    if matrix.numel() == 0:
        return matrix.new_zeros(matrix.shape[:-2])
    magnitude = matrix.abs()
    margin = 1 + (max(matrix.shape[-2:]) + 4) * torch.finfo(matrix.dtype).eps
    return (magnitude.sum(-1).amax(-1) * magnitude.sum(-2).amax(-1)).sqrt() * margin


def infinity_norm(weight: Tensor) -> Tensor:
    """Return ``|W|_inf = max_i sum_j |W_ij|``, the inf-norm of ``x -> W x`` (for `nn.Linear`, of its ``weight``).

    Exact up to float64 rounding, which is added. ``(..., m, n) -> (...)``, float64 for float64 or detached input of any
    dtype. Differentiable.

    >>> float(infinity_norm(torch.tensor([[1.0, -2.0], [0.5, 0.5]])))  # doctest: +ELLIPSIS
    3.0000...
    """
    matrix = _wide_enough(weight, dtype=torch.float64)
    if matrix.numel() == 0:
        return matrix.new_zeros(matrix.shape[:-2])
    return matrix.abs().sum(-1).amax(-1) * (1 + (matrix.shape[-1] + 4) * torch.finfo(torch.float64).eps)


def _svd_norm(weight: Tensor) -> Tensor:
    matrix = _wide_enough(weight, dtype=torch.float64)
    if matrix.numel() == 0:
        return matrix.new_zeros(matrix.shape[:-2])
    gram, outer = _scaled_gram(matrix)
    # Squaring halves the digits of small singular values only; the largest keeps its relative accuracy.
    return torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0).sqrt() * outer * (1 + SVD_MARGIN)


def _cholesky_norm(weight: Tensor) -> Tensor:
    matrix = _wide_enough(weight.detach(), dtype=torch.float64)
    if matrix.numel() == 0 or min(matrix.shape[-2:]) < _CHOLESKY_FROM:
        return _svd_norm(weight.detach())
    grams, outers = _scaled_gram(matrix, _gram_by_blocks)
    size = grams.shape[-1]
    squares = [_gram_norm(gram) for gram in grams.reshape(-1, size, size)]
    return torch.stack(squares).reshape(outers.shape).sqrt() * outers * (1 + SVD_MARGIN)


def _gram_norm(gram: Tensor) -> Tensor:
    """Upper bound of the largest eigenvalue of a positive semi-definite matrix, proved by a Cholesky factor.

    A factorisation that runs to completion shows that the smallest eigenvalue exceeds minus ``n u`` times the trace
    (Rump, 2006), which `SVD_MARGIN` covers.
    """
    # A rough estimate will do, since the factor below proves it: float32 halves the traffic.
    size = gram.diagonal().amax().clamp_min(torch.finfo(gram.dtype).tiny)
    estimate = _lanczos_largest((gram / size).float()).to(gram.dtype) * size
    for slack in (2e-5, 2e-4):
        candidate = estimate * (1 + slack)
        shifted = -gram
        shifted.diagonal().add_(candidate)
        if int(torch.linalg.cholesky_ex(shifted).info) == 0:
            return candidate
    return torch.linalg.eigvalsh(gram)[-1]


def _lanczos_largest(gram: Tensor, steps: int = 32) -> Tensor:
    """Largest Ritz value after a few Lanczos steps with full reorthogonalisation: a lower estimate, deterministic."""
    size = gram.shape[-1]
    vector = gram.diagonal() + gram.sum(-1).abs() + gram.diagonal().mean() * torch.linspace(0.5, 1, size).to(gram)
    basis = gram.new_zeros(steps, size)
    projected = gram.new_zeros(steps, steps)
    for step in range(steps):
        length = vector.norm()
        if float(length) <= torch.finfo(gram.dtype).eps:
            break
        basis[step] = vector / length
        image = gram @ basis[step]
        projected[step] = basis @ image
        vector = image - basis.mT @ (basis @ image)
        vector = vector - basis.mT @ (basis @ vector)
    # Only the lower triangle was filled, and only it is read.
    return torch.linalg.eigvalsh(projected)[-1].clamp_min(torch.finfo(gram.dtype).tiny)


def _scaled_gram(matrix: Tensor, product: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Return the smaller Gram matrix of ``W / m`` and ``m``, a magnitude chosen so that squares keep their digits."""
    product = product or _gram
    gram = product(matrix)
    diagonal = gram.detach().diagonal(dim1=-2, dim2=-1).amax(-1)
    if bool(((diagonal < 1e200) & (diagonal > 1e-200)).all()):
        return gram, torch.ones_like(diagonal)
    outer = matrix.detach().abs().amax((-2, -1), keepdim=True)
    outer = torch.where(outer > 0, outer, 1.0)
    return product(matrix / outer), outer[..., 0, 0]


def _gram(matrix: Tensor) -> Tensor:
    return matrix @ matrix.mT if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT @ matrix


def _gram_by_blocks(matrix: Tensor, blocks: int = 4) -> Tensor:
    """`_gram` with the upper triangle mirrored instead of multiplied: 5/8 of the work at four blocks; no gradient."""
    wide = matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT
    size = wide.shape[-2]
    gram = wide.new_empty(*wide.shape[:-1], size)
    edges = [size * block // blocks for block in range(blocks + 1)]
    for start, end in itertools.pairwise(edges):
        gram[..., start:end, :end] = wide[..., start:end, :] @ wide[..., :end, :].mT
        gram[..., :start, start:end] = gram[..., start:end, :start].mT
    return gram


def _frobenius(matrix: Tensor) -> Tensor:
    """Frobenius norm, kept above zero so that a zero matrix divides and differentiates cleanly, rounding added."""
    count = matrix.shape[-2] * matrix.shape[-1]
    info = torch.finfo(matrix.dtype)
    margin = 1 + 2 * (math.sqrt(count) + 8) * info.eps
    return (matrix.square().sum((-2, -1), keepdim=True) + info.tiny).sqrt() * margin


def _wide_enough(weight: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Check the weight and return it in the computing dtype (never below float32)."""
    if weight.ndim < 2:
        raise ShapeError(f"spectral norm: expected a matrix (..., m, n), received shape {tuple(weight.shape)}")
    # One finite sum proves all entries finite, at a tenth of the cost of looking at each.
    if not (bool(torch.isfinite(weight.detach().sum())) or bool(torch.isfinite(weight).all())):
        bad = int((~torch.isfinite(weight)).sum())
        raise NotLipschitzError(
            f"spectral norm: {bad} of {weight.numel()} entries of a {tuple(weight.shape)} weight are NaN or infinite, "
            "so the map has no Lipschitz constant; look for the step at which training diverged"
        )
    if dtype is None:
        dtype = weight.dtype if weight.dtype in (torch.float32, torch.float64) else torch.float32
    return weight.to(dtype)
