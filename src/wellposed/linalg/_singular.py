"""Singular values: all of them exactly, or an estimate of the largest one from below.

The estimate is by Golub-Kahan Lanczos, not power iteration, which does not converge in hundreds of
steps on near-orthogonal weights. Lanczos needs about twenty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wellposed.errors import ConfigError, ConvergenceError, ShapeError
from wellposed.linalg._norms import unit_scaled
from wellposed.linalg._orthogonal import wide

FIRST_CHECK = 16
CHECK_EVERY = 4
MAX_STEPS = 200
TOLERANCE = 1e-3
START_SEED = 20210


def singular_values(weight: Tensor) -> Tensor:
    """Return all singular values ``sigma_1 >= ... >= sigma_min(m, n) >= 0`` of ``W``.

    Status: exact to float64 rounding, about ``1e-16 sigma_1 min(m, n)`` absolute, for the weight as
    stored in any dtype, by LAPACK's SVD in float64.

    Args:
        weight: ``(m, n)``, real, finite; the values are float64, on its device, without gradient.

    Raises:
        ShapeError: not a matrix, or an empty one. ConvergenceError: the weight holds NaN or
            infinity.
        ConfigError: not a floating-point tensor (a quantised weight).

    Cost: ``O(m n min(m, n))`` in float64. When not to use: `largest_singular_value` is more than
    ten times cheaper for the largest; for an upper bound use `certified_spectral_norm`.

    >>> singular_values(torch.tensor([[0.0, 4.0], [3.0, 0.0]])).tolist()
    [4.0, 3.0]
    """
    return torch.linalg.svdvals(wide(_checked(weight)))


def largest_singular_value(weight: Tensor) -> float:
    """Return an estimate of ``sigma_1 = |W|_2``.

    Status: empirical, a lower estimate, never a certificate: its own estimate of the relative error
    is below 1e-3, and two nearly equal top singular values can hide a little more. If 200 steps do
    not reach that, the SVD is used. Source: Golub and Kahan (1965), with full orthogonalisation and
    a fixed start of its own, so the same weight gives the same number.

    Args:
        weight: ``(m, n)``, real, finite; half precision is computed in float32.

    Raises:
        ShapeError, ConfigError, ConvergenceError: as `singular_values`.

    Cost: 16 to 50 products with ``W`` and as many with its transpose, about 28 on Gaussian weights:
    a tenth of the SVD at width 768. When not to use: in a certificate, which needs an upper bound
    (`certified_spectral_norm`).

    >>> round(largest_singular_value(torch.diag(torch.tensor([3.0, 4.0, 1.0]))), 5)
    4.0
    """
    matrix = _checked(weight)
    matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    matrix, scale = unit_scaled(matrix)  # or squares would leave the range of float32
    if scale == 0:
        return 0.0
    with torch.autocast(matrix.device.type, enabled=False):
        estimate = _golub_kahan(matrix)
    if estimate is None:
        return singular_values(weight)[0].item()
    return estimate * scale.item()


def _golub_kahan(matrix: Tensor) -> float | None:
    """Bidiagonalise ``W V = U B``; return None if the tolerance is not reached."""
    rows, cols = matrix.shape
    limit = min(rows, cols)
    steps = min(limit, MAX_STEPS)
    lefts = matrix.new_empty(steps, rows)
    rights = matrix.new_empty(steps + 1, cols)
    generator = torch.Generator().manual_seed(START_SEED)
    start = torch.randn(cols, generator=generator, dtype=torch.float32).to(matrix)
    rights[0] = start / torch.linalg.vector_norm(start)
    band = torch.zeros(steps, steps + 1, dtype=torch.float64)
    rounding = 10 * torch.finfo(matrix.dtype).eps
    top = beta = 0.0
    for k in range(steps):
        left = matrix @ rights[k]
        if k:
            left = _orthogonalised(left.sub_(lefts[k - 1], alpha=beta), lefts[:k])
        alpha = torch.linalg.vector_norm(left).item()
        top = max(top, alpha)
        # Only the start vector's part in the null space is left.
        if alpha <= rounding * top:
            return _ritz(band[:k, : k + 1], 0.0)[0] if k else 0.0
        lefts[k] = left / alpha
        right = _orthogonalised((lefts[k] @ matrix).sub_(rights[k], alpha=alpha), rights[: k + 1])
        beta = torch.linalg.vector_norm(right).item()
        band[k, k] = alpha
        band[k, k + 1] = beta
        done = k + 1
        # An invariant subspace, or all of the space: exact.
        if beta <= rounding * top or done == limit:
            return _ritz(band[:done, : done + 1], 0.0)[0]
        if done >= FIRST_CHECK and (done - FIRST_CHECK) % CHECK_EVERY == 0:
            value, error = _ritz(band[:done, :done], beta)
            if error < TOLERANCE:
                return value
        rights[k + 1] = right / beta

    return None


def _ritz(band: Tensor, beta: float) -> tuple[float, float]:
    """Return the largest Ritz value and the estimate of its relative error."""
    left, values, _ = torch.linalg.svd(band)
    value = values[0].item()
    if beta == 0:
        return value, 0.0
    half = band.shape[0] // 2
    growth = 1 - torch.linalg.svdvals(band[:half, :half])[0].item() / value
    recent = band.shape[0] - CHECK_EVERY
    last_growth = 1 - torch.linalg.svdvals(band[:recent, :recent])[0].item() / value
    residual = beta * abs(left[-1, 0].item()) / value
    gap = max(1 - values[1].item() / value, torch.finfo(torch.float64).tiny)
    return value, min(growth, max(min(residual**2 / gap, residual), 2 * last_growth))


def _orthogonalised(vector: Tensor, basis: Tensor) -> Tensor:
    """Orthogonalise again, or near-orthogonal weights lose all digits in ten steps."""
    return vector - (basis @ vector) @ basis


def _checked(weight: Tensor) -> Tensor:
    """Return the matrix without its graph, or raise if it has no singular values."""
    if weight.ndim != 2 or weight.numel() == 0:
        raise ShapeError(
            "singular values belong to a non-empty matrix; received a tensor of shape"
            f" {tuple(weight.shape)}"
        )
    if not weight.is_floating_point():
        raise ConfigError(
            f"received a weight of dtype {weight.dtype}; expected a real floating-point one,"
            " dequantise first"
        )

    matrix = weight.detach()
    low, high = matrix.aminmax()
    if not (torch.isfinite(low) and torch.isfinite(high)):
        bad = int((~torch.isfinite(matrix)).sum())
        raise ConvergenceError(
            f"the weight of shape {tuple(weight.shape)} holds {bad} NaN or infinite values of"
            f" {weight.numel()}; it has no singular values"
        )

    return matrix
