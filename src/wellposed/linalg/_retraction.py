"""Steps along the matrices with ``W^T W = g^2 I``: tangent gradients and retractions.

They take ([batch,] rows, columns), rows >= columns, float32 or float64: square ones in Lie
coordinates, tall ones in the ambient space. A GEMM is a product of rows x columns x columns.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.errors import ConvergenceError, ShapeError
from wellposed.linalg._gram import minus_identity_, mirrored_product, scaled_product, small_shape
from wellposed.linalg._orthogonal import factor
from wellposed.linalg._tensors import Workspace

# Newton-Schulz converges if all eigenvalues of W^T W lie in (0, 3), from below if |W^T W - I| < 1.
_BASIN = 0.95
# Above this bound on |A|_2 (radians) the matrix exponential replaces the polynomial step.
QUADRATIC_LIMIT = 1.0
_MAX_POLISH = 12
# Fraction of the tolerance for bounds; the rest is for rounding. Each unmeasured step is charged
# _UNSEEN on top of its own defect, so at most seventeen of them follow each other.
_SHARE = 0.9
_UNSEEN = 0.05


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
    scaled_product(point.mT, gradient, out=product, alpha=0.5 / gain)
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
    small = small_shape(point)
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
    mirrored_product(skew, skew, out=moved, alpha=0.5 * scale * scale)  # A^2 / 2
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
        mirrored_product(skew, moved, out=third, alpha=0.25 * scale, sign=-1)  # A^3 / 8
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
        moved = minus_identity_(torch.matrix_exp(skew * scale))
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
    error = work("gram", small_shape(weight), weight)
    mirrored_product(weight.mT, weight, out=error, alpha=1.0 / (gain * gain))
    return minus_identity_(error)


def _added_product(point: Tensor, change: Tensor, *, out: Tensor) -> None:
    """Write ``W + W @ change``.

    The sums of ``W @ (I + change)`` would round each term of the change to the precision of the
    largest one. Steps of a matrix with one entry near 1 in each column would leave the tolerance.
    """
    multiply = torch.addmm if point.dim() == 2 else torch.baddbmm
    multiply(point, point, change, out=out)


def _require(point: Tensor, other: Tensor, *, square: bool) -> None:
    rows, columns = point.shape[-2:]
    if point.shape != other.shape or rows < columns or (square and rows != columns):
        wanted = "equal square shapes" if square else "equal shapes with rows >= columns"
        raise ShapeError(
            f"expected {wanted}, received {tuple(point.shape)} and {tuple(other.shape)}"
        )


def _largest_row(square: Tensor) -> Tensor:
    """Return the largest row 2-norm; its square bounds every entry of ``X^2`` for symmetric X."""
    return torch.linalg.vector_norm(square, dim=-1).amax()


def _spectral_bound(symmetric: Tensor, squared: Tensor | None = None) -> Tensor:
    """Return an upper bound on ``|X|_2`` over the batch, tighter with ``X^2``."""
    matrix = symmetric if squared is None else squared
    rows = matrix.abs().sum(dim=-1).amax(dim=-1)
    bound = torch.minimum(rows, torch.linalg.matrix_norm(matrix)).amax()
    return bound if squared is None else bound.sqrt()
