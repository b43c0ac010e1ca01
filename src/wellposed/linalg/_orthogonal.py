"""Matrices with ``W^T W = g^2 I``: the distance from them, and the nearest one."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from wellposed.call_checks import checked_arguments
from wellposed.errors import ConvergenceError, ShapeError
from wellposed.linalg._gram import gram_of, minus_identity_
from wellposed.linalg._norms import symmetric_product
from wellposed.linalg._tensors import full_precision, tall
from wellposed.options import Positive

# Weights (a, c) of Halley steps X (a I + b G) (I + c G)^-1, with G = X^T X and b = c + 1 - a. They
# are optimal for singular values from 1e-5 to 1 (Nakatsukasa, Bai and Gygi 2010, eq. 3.8) and end in
# [0.9997, 1]. Smaller singular values do not get there, which `_LAST` shows.
_HALLEY = ((5428.84, 7.370778e6), (17.68926, 86.3221), (3.423317, 3.891433))
# Below so many times as many rows as columns, a CPU solves faster than it inverts and multiplies.
_SOLVES_BELOW = 1.5
# Largest row norm of E = X^T X - I before the last step X (I - E/2), whose error is its square.
_LAST = 1e-3

ErrorNorm: TypeAlias = Literal["max", "spectral"]


@checked_arguments
def isometry_error(
    weight: Tensor, *, gain: float | Tensor = 1.0, norm: ErrorNorm = "max"
) -> Tensor:
    """Measure how far W is from ``gain`` times an isometry, 0 for perfect matrices: (...).

    ``"max"`` is the largest entry of ``|W^T W / gain^2 - I|`` (``W W^T`` if wide), ``"spectral"`` the
    largest ``|sigma / gain - 1|`` of its singular values. With n of them, the second is at most n
    times the first; of trained weights it is a few times it.

    Status: exact up to the rounding of one product in float64 (float32 on devices without it), and
    of its eigenvalues.

    Args:
        weight: (..., rows, columns), floating.
        gain: singular value of a perfect matrix, above 0; (..., 1, 1) gives each matrix its own.
        norm: ``"max"`` or ``"spectral"``.

    Raises:
        ShapeError: the tensor has fewer than two dimensions.

    Cost: one product of ``max(rows, columns) * min(rows, columns)^2``; with ``"spectral"`` also the
    eigenvalues of a small Gram matrix, about ten times it. When not to use: in a training loss. The
    penalties of `wellposed.functional` are smooth and cheaper to differentiate.

    >>> float(isometry_error(torch.eye(3)))
    0.0
    """
    _require_matrix("isometry_error", weight)
    point = tall(wide(weight))
    with full_precision(point.device.type):
        error = minus_identity_(gram_of(point).div_(gain * gain))
    if norm == "max":
        return error.abs_().amax(dim=(-2, -1))
    # Of I + E, whose difference to I would be rounded away if it were taken of the singular values.
    change = torch.linalg.eigvalsh(error).clamp_min(-1.0)
    return (change / ((1.0 + change).sqrt() + 1.0)).abs().amax(dim=-1)


@checked_arguments
def nearest_orthogonal(weight: Tensor, *, gain: Positive = 1.0) -> Tensor:
    """Return the matrix with ``W'^T W' = gain^2 I`` that is nearest to W, without gradient.

    Status: to tolerance, see `polar_factors`; nearest in every unitarily invariant norm. One of
    many if W is singular. The mean singular value is the gain that moves W least.
    Source: Fan and Hoffman 1955, Proc. AMS 6.

    Args:
        weight: (..., rows, columns), floating; wide matrices get orthonormal rows.
        gain: the singular value wanted, above 0.

    Raises:
        ShapeError: no matrix. ConfigError: gain not above 0. ConvergenceError: W is not finite.

    Cost: as `polar_factors`. When not to use: inside training, see `wellposed.constrain`.

    >>> nearest_orthogonal(torch.diag(torch.tensor([2.0, -0.5]))).tolist()
    [[1.0, 0.0], [0.0, -1.0]]
    """
    _require_matrix("nearest_orthogonal", weight)
    flat = weight.detach().reshape(-1, *weight.shape[-2:])
    nearest = polar_factors(tall(flat)).mul_(gain).to(weight.dtype)
    return (nearest if weight.shape[-2] >= weight.shape[-1] else nearest.mT).reshape(weight.shape)


def polar_factors(stack: Tensor, gram: Tensor | None = None) -> Tensor:
    """Return the polar factor ``W (W^T W)^{-1/2}`` of each matrix, in float64.

    Status: to tolerance: within about 1e-6 of the factor by SVD (spectral norm), ``max |U^T U - I|
    <= 1e-6``. Three Halley steps and a Newton-Schulz step; an SVD for float64 input and for
    matrices that these do not reach (condition above some 1e5, rank-deficient).
    Source: Nakatsukasa, Bai and Gygi 2010, SIAM J. Matrix Anal. 31(5); Higham 2008, sec. 8.3.

    Args:
        stack: (batch, rows, columns), rows >= columns, floating.
        gram: ``W^T W`` of each in float64, if it is known.

    Raises:
        ConvergenceError: a matrix is not finite.

    Cost: 11 products of rows x columns^2, half of them in float32; one read; as many launches for a
    stack as for one matrix; memory of six copies in float64.
    """
    with full_precision(stack.device.type):
        point = wide(stack.clone())
        failed = list(range(len(stack)))
        if stack.dtype != point.dtype and stack.numel():
            gram = symmetric_product(point.mT, point) if gram is None else gram
            point, is_near = _by_halley_steps(point, gram)
            failed = torch.nonzero(~is_near).flatten().tolist()
        if failed:
            if not bool(torch.isfinite(stack[failed]).all()):
                what = f"the {tuple(stack.shape[1:])} matrix holds values that are not finite"
                raise ConvergenceError(f"nearest_orthogonal: {what}")
            left, _, right = factor(stack[failed])
            point[failed] = left @ right
    return point


def _by_halley_steps(point: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return the polar factors in float64, and whether each is orthogonal."""
    # Both are upper bounds on |W|_2^2.
    rows = torch.linalg.vector_norm(gram, ord=1, dim=-1).amax(-1)
    scale = torch.minimum(rows, torch.linalg.matrix_norm(gram))[:, None, None]
    point = point.div_(scale.sqrt())
    gram = gram / scale
    solves = point.device.type == "cpu" and point.shape[-2] < _SOLVES_BELOW * point.shape[-1]
    for step, (a, c) in enumerate(_HALLEY):
        if step:
            point = point.float()
            gram = symmetric_product(point.mT, point)
        # X (a I + b G) (I + c G)^-1 = X (r I + (a - r) (I + c G)^-1), r = b / c
        rest = (c + 1.0 - a) / c
        gram.mul_(c).diagonal(dim1=-2, dim2=-1).add_(1.0)
        lower = torch.linalg.cholesky_ex(gram).L
        if solves:
            solved = torch.linalg.solve_triangular(lower.mT, point, upper=True, left=False)
            solved = torch.linalg.solve_triangular(lower, solved, upper=False, left=False)
        else:
            solved = point @ torch.cholesky_inverse(lower)
        point = solved.mul_(a - rest).add_(point, alpha=rest)

    error = minus_identity_(symmetric_product(point.mT, point))
    is_near = torch.linalg.vector_norm(error, dim=-1).amax(-1) <= _LAST
    return point.double().sub_(point @ error, alpha=0.5), is_near


def factor(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the thin SVD in float64 (float32 on devices without it)."""
    left, values, right = torch.linalg.svd(wide(weight), full_matrices=False)
    return left, values, right


def wide(weight: Tensor) -> Tensor:
    """Return the values in float64 (float32 on devices without it)."""
    return weight.detach().to(torch.float32 if weight.device.type == "mps" else torch.float64)


def _require_matrix(name: str, weight: Tensor) -> None:
    if weight.dim() < 2 or not weight.is_floating_point():
        raise ShapeError(
            f"{name}: expected a floating tensor (..., rows, columns), received {weight.dtype}"
            f" {tuple(weight.shape)}"
        )
