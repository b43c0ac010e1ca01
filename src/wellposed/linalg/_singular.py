"""Singular values: all of them exactly, or the largest one quickly and from below, and numbers made
of them.

The quick one is Golub-Kahan Lanczos, never power iteration: near-orthogonal weights have a flat
top, where power iteration does not converge in hundreds of steps and Lanczos needs about twenty.
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
    stored in any dtype. Method: LAPACK's SVD without vectors in float64.

    Args:
        weight: ``(m, n)``, real, finite.

    Returns:
        ``(min(m, n),)``, float64, on the device of ``weight``, without gradient.

    Raises:
        ShapeError: not a matrix, or an empty one.
        ConfigError: not a floating-point tensor (a quantised weight).
        ConvergenceError: the weight holds NaN or infinity.

    Cost: ``O(m n min(m, n))`` in float64. When only the largest is needed, `largest_singular_value`
    is more than ten times cheaper; when an upper bound is needed, use `certified_spectral_norm`.

    >>> singular_values(torch.tensor([[0.0, 4.0], [3.0, 0.0]])).tolist()
    [4.0, 3.0]
    """
    return torch.linalg.svdvals(wide(_checked(weight)))


def largest_singular_value(weight: Tensor) -> float:
    """Return an estimate of ``sigma_1 = |W|_2``.

    Status: empirical: a lower estimate, never a certificate, stopped when its own estimate of the
    relative error is below 1e-3 (a top pair of nearly equal singular values can hide a little
    more); `singular_values` is exact. Method: Golub and Kahan (1965)
    bidiagonalisation from a fixed random start, one matrix at a time, every vector orthogonalised
    against all before it; 16 steps at least. The error estimate is the less of two: ``r^2 / gap`` with
    the residual ``r = |W^T u - sigma v|`` and the gap to the second Ritz value (second order in r), and
    the growth of the Ritz value since half as many steps, which stays honest on flat spectra where
    the gap closes. Where 200 steps do not reach that, the SVD is taken.

    Args:
        weight: ``(m, n)``, real, finite; half precision is computed in float32, other dtypes in
            their own.

    Returns:
        The estimate. The same weight gives the same number; no global random state is used.

    Raises:
        ShapeError: not a matrix, or an empty one.
        ConfigError: not a floating-point tensor.
        ConvergenceError: the weight holds NaN or infinity.

    Cost: 16 to 50 products with ``W`` and as many with its transpose, about 28 on Gaussian weights:
    a tenth of the SVD at width 768. When not to use: in a certificate, where an upper bound is
    needed (`certified_spectral_norm`).

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
    """Run the bidiagonalisation ``W V = U B``, ``W^T U = V B^T + beta v e^T``; None where it did
    not reach the tolerance."""
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
        # The start vector's part in the null space; nothing is left to find.
        if alpha <= rounding * top:
            return _ritz(band[:k, : k + 1], 0.0)[0] if k else 0.0
        lefts[k] = left / alpha
        right = _orthogonalised((lefts[k] @ matrix).sub_(rights[k], alpha=alpha), rights[: k + 1])
        beta = torch.linalg.vector_norm(right).item()
        band[k, k], band[k, k + 1] = alpha, beta
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
    """Subtract what rounding has left of the projection on the rows of ``basis``; the two-term part
    is gone already.

    Without this second pass near-orthogonal weights, where beta is far below alpha, lose all digits
    in ten steps.
    """
    return vector - (basis @ vector) @ basis


def _checked(weight: Tensor) -> Tensor:
    """Return the matrix without its graph, or raise for what has no singular values."""
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
