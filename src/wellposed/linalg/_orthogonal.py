"""Matrices with ``W^T W = g^2 I``: the nearest one, the distance, tangent gradients, retractions.

Retractions take ([batch,] rows, columns), rows >= columns, float32 or float64: square ones in Lie
coordinates, tall ones in the ambient space. A GEMM is a product of rows x columns x columns.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from wellposed.call_checks import checked_arguments
from wellposed.errors import ConvergenceError, ShapeError
from wellposed.linalg._norms import symmetric_product
from wellposed.linalg._tensors import Workspace, full_precision, tall
from wellposed.options import Positive

# Newton-Schulz converges if all eigenvalues of W^T W lie in (0, 3), from below if |W^T W - I| < 1.
_BASIN = 0.95
# Above this bound on |A|_2 (radians) the matrix exponential replaces the polynomial step.
QUADRATIC_LIMIT = 1.0
_MAX_POLISH = 12
# From this size on, half of a symmetric product is computed in row panels and mirrored: a quarter
# less time on a CPU.
_PANELS_FROM = 256
_PANEL = 128
# Fraction of the tolerance for bounds; the rest is for rounding. Each unmeasured step is charged
# _UNSEEN on top of its own defect, so at most seventeen of them follow each other.
_SHARE = 0.9
_UNSEEN = 0.05
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
        error = _minus_identity_(gram_of(point).div_(gain * gain))
    if norm == "max":
        return error.abs_().amax(dim=(-2, -1))
    # Of I + E, whose difference to I would be rounded away if it were taken of the singular values.
    change = torch.linalg.eigvalsh(error).clamp_min(-1.0)
    return (change / ((1.0 + change).sqrt() + 1.0)).abs().amax(dim=-1)


def gram_of(point: Tensor) -> Tensor:
    """Return ``W^T W`` of tall (..., rows, columns), on a CPU half of it mirrored."""
    flat = point[None] if point.dim() == 2 else point.flatten(0, -3)
    gram = point.new_empty(_small_shape(flat))
    _mirrored_product(flat.mT, flat, out=gram, alpha=1.0)
    return gram.reshape(_small_shape(point))


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
    error = _minus_identity_(symmetric_product(point.mT, point))
    is_near = torch.linalg.vector_norm(error, dim=-1).amax(-1) <= _LAST
    return point.double().sub_(point @ error, alpha=0.5), is_near


def factor(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the thin SVD in float64 (float32 on devices without it)."""
    left, values, right = torch.linalg.svd(wide(weight), full_matrices=False)
    return left, values, right


class Retraction(NamedTuple):
    """Which retraction was used, and an upper bound on the spectral size of the requested step."""

    method: str
    """``"quadratic"``, ``"cubic"``, ``"corrected"``, ``"newton_schulz"``, ``"exponential"``,
    ``"series"``, ``"svd"``"""
    size: float = math.nan
    """Upper bound on ``|A|_2`` (square) or ``|W^T W / g^2 - I|_2`` (tall); nan if not needed."""
    drift: float = math.nan
    """Bound on ``max |W^T W / g^2 - I|`` after `rotate`, for its next call."""


def skew_gradient_(
    point: Tensor, gradient: Tensor, *, gain: float = 1.0, workspace: Workspace | None = None
) -> Tensor:
    """Replace the gradient of a square W by ``skew(W^T G) / gain``, its Lie coordinates at W.

    Status: exact (Riemannian gradient of the left-invariant metric). An elementwise optimizer makes
    a skew step of it. Source: Edelman, Arias and Smith 1998, SIAM J. Matrix Anal. 20(2), sec. 2.2.

    Args:
        point: ([batch,] n, n) with ``W^T W = gain^2 I``.
        gradient: same shape, overwritten and returned.
        gain: singular value of W.
        workspace: buffers to reuse.

    Raises:
        ShapeError: the matrices are not square or differ in shape.

    Cost: 1 GEMM.

    >>> skew_gradient_(torch.eye(2), torch.tensor([[5.0, 2.0], [0.0, 7.0]])).tolist()
    [[0.0, 1.0], [-1.0, 0.0]]
    """
    _require(point, gradient, square=True)
    work = workspace or Workspace()
    product = work("product", gradient.shape, gradient, padded=True)
    _product(point.mT, gradient, out=product, alpha=0.5 / gain)
    return torch.sub(product, product.mT, out=gradient)


def tangent_gradient_(
    point: Tensor, gradient: Tensor, *, gain: float = 1.0, workspace: Workspace | None = None
) -> Tensor:
    """Project the gradient of a tall W on the tangent space at W: ``G - W sym(W^T G) / gain^2``.

    Status: exact (Euclidean metric). Source: Edelman, Arias and Smith 1998, eq. (2.4).

    Args:
        point: ([batch,] rows, columns), rows >= columns, ``W^T W = gain^2 I``.
        gradient: same shape, overwritten and returned.
        gain: singular value of W.
        workspace: buffers to reuse.

    Raises:
        ShapeError: the matrices are wide or differ in shape.

    Cost: 2 GEMM.

    >>> tangent_gradient_(torch.eye(3, 1), torch.tensor([[5.0], [2.0], [1.0]])).tolist()
    [[0.0], [2.0], [1.0]]
    """
    _require(point, gradient, square=False)
    work = workspace or Workspace()
    small = _small_shape(point)
    product = torch.matmul(point.mT, gradient, out=work("gram", small, gradient))
    symmetric = torch.add(product, product.mT, out=work("square", small, gradient))
    normal = torch.matmul(point, symmetric, out=work("tall", point.shape, gradient))
    return gradient.sub_(normal, alpha=0.5 / (gain * gain))


def rotate(
    point: Tensor,
    step: Tensor,
    *,
    out: Tensor,
    gain: float = 1.0,
    tolerance: float = 1e-5,
    drift: float | None = None,
    workspace: Workspace | None = None,
) -> Retraction:
    """Move a square W along ``A = skew(step) / gain`` to ``out = W exp(A) + O(|A|^3)``.

    Status: to tolerance: the largest entry of ``|out^T out / gain^2 - I|``. Methods are chosen by
    bounds that hold in exact arithmetic. Small steps use ``I + A + A^2/2``, then with ``A^3/8``, a
    measured correction, or Newton-Schulz; from ``|A|_2 > 1`` (bound ``|A^2|^{1/2}``) on, the
    exponential. The sign of the determinant stays. Derivation: docs/theory/steps.md. Source:
    `wellposed` (the choice); Absil, Mahony and Sepulchre 2008, Optimization Algorithms on Matrix
    Manifolds, ch. 4 (retractions).

    Args:
        point: ([batch,] n, n), nearly ``gain`` times orthogonal.
        step: same shape, in the coordinates of `skew_gradient_`; its skew part is taken. It is not
            changed unless it is ``out``.
        out: same shape, receives the result; must not overlap ``point``, and may be ``step``.
        gain: singular value of W.
        tolerance: largest accepted entry of ``|W^T W / gain^2 - I|``.
        drift: the ``drift`` of the retraction that made ``point``, if it is unchanged since. It
            saves the correction while such steps stay within the tolerance. None measures.
        workspace: buffers to reuse.

    Raises:
        ConvergenceError: the step or the point is not finite; ``out`` then holds ``point``.
        ShapeError: the matrices are not square or differ in shape.

    Cost: 2 GEMM up to about 0.1 radians, 3 up to 0.4, now and then one more; 5 for larger steps,
    about 10 with the exponential. All but the last are symmetric: a quarter less on a CPU from 256
    columns.

    >>> out, move = torch.empty(2, 2), torch.tensor([[0.0, -0.1], [0.1, 0.0]])
    >>> rotate(torch.eye(2), move, out=out).method, round(float(out[1, 0]), 3)
    ('corrected', 0.1)
    """
    _require(point, step, square=True)
    work = workspace or Workspace()
    # A = scale * skew; the products take the factors, which saves passes over memory.
    skew = torch.sub(step, step.mT, out=work("skew", step.shape, point))
    scale = 0.5 / gain
    moved = work("square", step.shape, point)
    _mirrored_product(skew, skew, out=moved, alpha=0.5 * scale * scale)  # A^2 / 2
    # Steps far below the tolerance need no closer guess.
    small = 0.1 * math.sqrt(tolerance)
    (half,) = work.bounds("half", _largest_row(moved), minimum=small)
    if not math.isfinite(half):
        out.copy_(point)
        raise ConvergenceError(
            f"the step of a {tuple(point.shape)} orthogonal weight is not finite"
        )
    budget = _SHARE * tolerance
    # |A|_2^2 <= |A^2|_F <= sqrt(n) times its largest row, and likewise for A^3.
    size = (2.0 * half * math.sqrt(point.shape[-1])) ** 0.5
    # A row a of the skew A has |a|^2 = -(A^2)_ii.
    method = "quadratic"
    defect = half * half
    reach = math.sqrt(2.0 * half) + half
    is_large = False
    if defect > 0.4 * budget:
        third = work("cubic", step.shape, point)
        _mirrored_product(skew, moved, out=third, alpha=0.25 * scale, sign=-1)  # A^3 / 8
        (row,) = work.bounds("third", _largest_row(third))
        method = "cubic"
        defect = row * row
        reach = reach + row
        size = min(size, 2.0 * (row * math.sqrt(point.shape[-1])) ** (1 / 3))
        if defect > budget and size > QUADRATIC_LIMIT:
            limit = 0.5 * QUADRATIC_LIMIT**2
            (spread,) = work.bounds("spread", _spectral_bound(moved), below=limit)
            size = min(size, (2.0 * spread) ** 0.5)
            is_large = size > QUADRATIC_LIMIT
        moved.add_(third)
    if is_large:
        moved = _minus_identity_(torch.matrix_exp(skew * scale))
    else:
        moved.add_(skew, alpha=scale)  # p - I
    unseen = math.inf if drift is None else drift + defect + _UNSEEN * tolerance
    if unseen <= budget:
        _added_product(point, moved, out=out)
        return Retraction(method, math.nan, unseen)
    if defect <= budget:
        error = _error(point, gain, work)
        (e,) = work.bounds("drift", _largest_row(error), minimum=0.3 * tolerance)
        e2 = e * math.sqrt(point.shape[-1])  # bounds |E|_2
        left = defect + reach * e * (1.0 + e2) + reach * reach * e2 + e * e * (0.75 + 0.25 * e2)
        if left <= budget:
            _added_product(point, moved.add_(error, alpha=-0.5), out=out)
            return Retraction("corrected", math.nan, left)
    _added_product(point, moved, out=out)
    method, left = _polish_(out, gain, tolerance, work)
    if method != "svd" and is_large:
        method = "exponential"
    return Retraction(method, size, left + _UNSEEN * tolerance)


def retract_(
    weight: Tensor,
    *,
    gain: float = 1.0,
    tolerance: float = 1e-5,
    workspace: Workspace | None = None,
) -> Retraction:
    """Replace a tall W by ``gain`` times its polar factor ``W (I + E)^{-1/2}``.

    Status: to tolerance: the largest entry of ``|E|``, ``E = W^T W / gain^2 - I``. The series up to
    ``E^3`` is applied; if its error, ``35/64 E^4 + O(E^5)``, may exceed the tolerance, measured
    Newton-Schulz steps follow. If no bound shows ``|E|_2 < 1``, a float64 SVD is used. Source:
    Higham 2008, Functions of Matrices, sec. 8.3.

    Args:
        weight: ([batch,] rows, columns), rows >= columns, changed in place.
        gain: singular value wanted.
        tolerance: largest accepted entry of ``|W^T W / gain^2 - I|``.
        workspace: buffers to reuse.

    Raises:
        ConvergenceError: the weight is not finite; it is left unchanged. ShapeError: it is wide.

    Cost: 2 GEMM and 2 products of columns^3.

    >>> retract_(torch.eye(3, 2) + 0.01).method
    'series'
    """
    _require(weight, weight, square=False)
    work = workspace or Workspace()
    error = _error(weight, gain, work)
    squared = torch.matmul(error, error, out=work("square", error.shape, weight))
    (size,) = work.bounds("size", _spectral_bound(error, squared), below=_BASIN)
    if not math.isfinite(size):
        raise ConvergenceError(
            f"the step of a {tuple(weight.shape)} orthogonal weight is not finite"
        )
    if size >= _BASIN:
        return Retraction(_svd_(weight, gain), size)
    (e2,) = work.bounds("squared", _largest_row(squared))
    slope = torch.mul(error, -5 / 16, out=work("skew", error.shape, weight))
    slope.diagonal(dim1=-2, dim2=-1).add_(3 / 8)
    cubic = torch.matmul(squared, slope, out=work("cubic", error.shape, weight)).sub_(
        error, alpha=0.5
    )
    weight.add_(torch.matmul(weight, cubic, out=work("tall", weight.shape, weight)))
    if 0.55 * e2 * e2 * (1.0 + size) <= 0.5 * tolerance:
        return Retraction("series", size)
    return Retraction(_polish_(weight, gain, tolerance, work)[0], size)


def _polish_(weight: Tensor, gain: float, tolerance: float, work: Workspace) -> tuple[str, float]:
    """Take Newton-Schulz steps, or an SVD; return the method and a bound on the error."""
    for _ in range(_MAX_POLISH):
        error = _error(weight, gain, work)
        (row,) = work.bounds("row", _largest_row(error), below=_BASIN)
        if not math.isfinite(row):
            raise ConvergenceError(
                f"the step of a {tuple(weight.shape)} orthogonal weight is not finite"
            )
        # row <= |E|_2 <= sqrt(n) row; only between them are the costlier bounds needed.
        if row >= _BASIN or (
            row * math.sqrt(weight.shape[-1]) >= _BASIN
            and work.bounds("rows", _spectral_bound(error), below=_BASIN)[0] >= _BASIN
            and work.bounds("spectral", _spectral_bound(error, error @ error), below=_BASIN)[0]
            >= _BASIN
        ):
            break
        weight.sub_(torch.matmul(weight, error, out=work("tall", weight.shape, weight)), alpha=0.5)
        # Every entry of the new error, -3/4 E^2 + 1/4 E^3, is at most the row norm's square.
        if row * row <= 0.5 * tolerance:
            return "newton_schulz", row * row
    return _svd_(weight, gain), 0.0


def _svd_(weight: Tensor, gain: float) -> str:
    left, _, right = factor(weight)
    weight.copy_((left * gain) @ right)
    return "svd"


def _error(weight: Tensor, gain: float, work: Workspace) -> Tensor:
    """Return ``E = W^T W / g^2 - I``."""
    error = work("gram", _small_shape(weight), weight)
    _mirrored_product(weight.mT, weight, out=error, alpha=1.0 / (gain * gain))
    return _minus_identity_(error)


def _product(left: Tensor, right: Tensor, *, out: Tensor, alpha: float) -> None:
    """Write ``alpha * left @ right``; the factor costs nothing inside the product."""
    multiply = torch.addmm if left.dim() == 2 else torch.baddbmm
    multiply(out, left, right, beta=0, alpha=alpha, out=out)


def _added_product(point: Tensor, change: Tensor, *, out: Tensor) -> None:
    """Write ``W + W @ change``.

    The sums of ``W @ (I + change)`` would round each term of the change to the precision of the
    largest one. Steps of a matrix with one entry near 1 in each column would leave the tolerance.
    """
    multiply = torch.addmm if point.dim() == 2 else torch.baddbmm
    multiply(point, point, change, out=out)


def _mirrored_product(
    left: Tensor, right: Tensor, *, out: Tensor, alpha: float, sign: int = 1
) -> None:
    """Write ``alpha * left @ right``, known to be symmetric, or skew-symmetric with sign -1."""
    size = out.shape[-1]
    if size < _PANELS_FROM or out.device.type != "cpu":
        _product(left, right, out=out, alpha=alpha)
        return
    width = max(_PANEL, size // 8)
    for start in range(0, size, width):
        rows = slice(start, start + width)
        panel = out[..., rows, start:]
        _product(left[..., rows, :], right[..., start:], out=panel, alpha=alpha)
        if start:
            torch.mul(out[..., :start, rows].mT, sign, out=out[..., rows, :start])


def _small_shape(weight: Tensor) -> tuple[int, ...]:
    return (*weight.shape[:-2], weight.shape[-1], weight.shape[-1])


def _require(point: Tensor, other: Tensor, *, square: bool) -> None:
    rows, columns = point.shape[-2:]
    if point.shape != other.shape or rows < columns or (square and rows != columns):
        wanted = "equal square shapes" if square else "equal shapes with rows >= columns"
        raise ShapeError(
            f"expected {wanted}, received {tuple(point.shape)} and {tuple(other.shape)}"
        )


def _minus_identity_(square: Tensor) -> Tensor:
    """Subtract I in place."""
    square.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    return square


def _largest_row(square: Tensor) -> Tensor:
    """Return the largest row 2-norm; its square bounds every entry of ``X^2`` for symmetric X."""
    return torch.linalg.vector_norm(square, dim=-1).amax()


def _spectral_bound(symmetric: Tensor, squared: Tensor | None = None) -> Tensor:
    """Return an upper bound on ``|X|_2`` over the batch, tighter with ``X^2``."""
    matrix = symmetric if squared is None else squared
    rows = matrix.abs().sum(dim=-1).amax(dim=-1)
    bound = torch.minimum(rows, torch.linalg.matrix_norm(matrix)).amax()
    return bound if squared is None else bound.sqrt()


def wide(weight: Tensor) -> Tensor:
    """Return the values in float64 (float32 on devices without it)."""
    return weight.detach().to(torch.float32 if weight.device.type == "mps" else torch.float64)


def _require_matrix(name: str, weight: Tensor) -> None:
    if weight.dim() < 2 or not weight.is_floating_point():
        raise ShapeError(
            f"{name}: expected a floating tensor (..., rows, columns), received {weight.dtype}"
            f" {tuple(weight.shape)}"
        )
