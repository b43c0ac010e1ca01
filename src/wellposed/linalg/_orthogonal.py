"""Matrices with ``W^T W = g^2 I``: the nearest one, the distance from them, and tangent projection and
retraction, square (Lie coordinates) and tall (ambient).

Shapes: every matrix of a retraction is (rows, columns) or (batch, rows, columns) with rows >= columns, float32 or
float64. GEMM = one product of rows x columns x columns.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.call_checks import checked_arguments
from wellposed.errors import ConvergenceError, ShapeError
from wellposed.linalg._norms import symmetric_product
from wellposed.linalg._tensors import Workspace, full_precision, tall
from wellposed.options import Positive

# Newton-Schulz converges while every eigenvalue of W^T W lies in (0, 3); from |W^T W - I| < 1 on it
# does so from below.
_BASIN = 0.95
# Above this bound on |A|_2 (radians) the polynomial step is replaced by the matrix exponential.
QUADRATIC_LIMIT = 1.0
_MAX_POLISH = 12
# From this size on, half of a symmetric product is computed in row panels and mirrored (a CPU saves
# a quarter of it).
_PANELS_FROM = 256
_PANEL = 128
# The share of the tolerance that bounds may use up, the rest being rounding; and what one step that
# does not measure its error is charged beside its own defect, so that at most seventeen such steps
# follow each other.
_SHARE = 0.9
_UNSEEN = 0.05
# Halley steps X (a I + b G) (I + c G)^-1, G = X^T X, with the weights (a, c) that are optimal for
# singular values from 1e-5 to 1 (Nakatsukasa, Bai and Gygi 2010, eq. 3.8, b = c + 1 - a). They end
# in [0.9997, 1]. Smaller singular values do not get there, which `_DONE` shows.
_HALLEY = ((5428.84, 7.370778e6), (17.68926, 86.3221), (3.423317, 3.891433))
# Largest row norm of E = X^T X - I before the last step, X (I - E/2): it leaves no entry above its
# square.
_LAST = 1e-3


def isometry_error(weight: Tensor, *, gain: float | Tensor = 1.0) -> Tensor:
    """Measure ``max |W^T W / gain^2 - I|`` (``W W^T`` if wide): zero exactly when W is ``gain``
    times an isometry.

    Status: exact up to the rounding of one Gram product, which is taken in float64 (float32 on
    devices without it).

    Args:
        weight: (..., rows, columns), floating; the Gram matrix of the smaller side is used.
        gain: the common singular value a perfect matrix would have; above 0; (..., 1, 1) gives
            each matrix its own.

    Returns:
        (...) the largest absolute entry, in the dtype of the product.

    Raises:
        ShapeError: the tensor has fewer than two dimensions.

    Cost: one product of ``max(rows, columns) * min(rows, columns)^2``. Not for a training loss: the
    penalties of `wellposed.functional` are smooth and cheaper to differentiate.

    >>> import torch
    >>> float(isometry_error(torch.eye(3)))
    0.0
    """
    _require_matrix("isometry_error", weight)
    point = tall(wide(weight))
    with full_precision(point.device.type):
        return _minus_identity_((point.mT @ point).div_(gain * gain)).abs().amax(dim=(-2, -1))


@checked_arguments
def nearest_orthogonal(weight: Tensor, *, gain: Positive = 1.0) -> Tensor:
    """Return the matrix nearest to W, in every unitarily invariant norm, among those with ``W'^T W' =
    gain^2 I``.

    Status: to tolerance. Of float64 weights the polar factor is that of an SVD; see
    `polar_factors` for the others. Source: Fan and Hoffman 1955, Proc. AMS 6. The gain that moves W
    least is its mean singular value, because ``|W - g U|_F^2 = sum (s_i - g)^2``.

    Args:
        weight: (..., rows, columns), floating; wide matrices get orthonormal rows.
        gain: the singular value wanted, above 0.

    Returns:
        (..., rows, columns) in the dtype of ``weight``, without gradient. A singular W has many
        nearest isometries; one is returned.

    Raises:
        ShapeError: no matrix. ConfigError: gain not above 0. ConvergenceError: W is not finite.

    Cost: as `polar_factors`. Not for use inside training: see `wellposed.constrain`.

    >>> import torch
    >>> nearest_orthogonal(torch.diag(torch.tensor([2.0, -0.5]))).tolist()
    [[1.0, 0.0], [0.0, -1.0]]
    """
    _require_matrix("nearest_orthogonal", weight)
    flat = weight.detach().reshape(-1, *weight.shape[-2:])
    nearest = polar_factors(tall(flat)).mul_(gain).to(weight.dtype)
    return (nearest if weight.shape[-2] >= weight.shape[-1] else nearest.mT).reshape(weight.shape)


def polar_factors(stack: Tensor, gram: Tensor | None = None) -> Tensor:
    """Return the polar factor ``W (W^T W)^{-1/2}`` of each matrix, in float64.

    Status: to tolerance. Three scaled Halley steps by Cholesky factors, the first in float64 and two
    in float32, and one Newton-Schulz step in float64. The result is that of an SVD up to about 1e-6 in
    the spectral norm, with ``max |U^T U - I| <= 1e-6``. A matrix that does not get there (condition
    above some 1e5, or rank-deficient), and every matrix in float64, takes an SVD in float64 alone.
    Source: Nakatsukasa, Bai and Gygi 2010, SIAM J. Matrix Anal. 31(5); Higham 2008, sec. 8.3.

    Args:
        stack: (batch, rows, columns), rows >= columns, floating.
        gram: ``W^T W`` of each in float64, if it is known.

    Raises:
        ConvergenceError: a matrix is not finite.

    Cost: 11 products of rows x columns^2, half of them in float32; one read. A stack takes as many
    launches as one matrix, and memory of six copies in float64.
    """
    with full_precision(stack.device.type):
        point, failed = wide(stack.clone()), list(range(len(stack)))
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
    """Return the polar factors of matrices in float64, and whether each is orthogonal."""
    # Both are at least |W|_2^2.
    square = torch.minimum(gram.abs().sum(-1).amax(-1), torch.linalg.matrix_norm(gram))
    scale = square[:, None, None]
    point, gram = point / scale.sqrt(), gram / scale
    for step, (a, c) in enumerate(_HALLEY):
        if step:
            point = point.float()
            gram = symmetric_product(point.mT, point)
        # X (a I + b G) (I + c G)^-1 = X (r I + (a - r) (I + c G)^-1), r = b / c
        rest = (c + 1.0 - a) / c
        gram.mul_(c).diagonal(dim1=-2, dim2=-1).add_(1.0)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky_ex(gram).L)
        inverse.mul_(a - rest).diagonal(dim1=-2, dim2=-1).add_(rest)
        point = point @ inverse
    error = point.double()
    error = symmetric_product(error.mT, error)
    error.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    is_near = torch.linalg.vector_norm(error, dim=-1).amax(-1) <= _LAST
    return point.double().sub_(point @ error.float(), alpha=0.5), is_near


def factor(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the thin SVD in float64 (float32 on devices without it)."""
    left, values, right = torch.linalg.svd(wide(weight), full_matrices=False)
    return left, values, right


class Retraction(NamedTuple):
    """What a retraction did: its name, and an upper bound on the spectral size of the step it was
    asked to take."""

    method: str
    """``"quadratic"``, ``"cubic"``, ``"corrected"``, ``"newton_schulz"``, ``"exponential"``,
    ``"series"``, ``"svd"``"""
    size: float = math.nan
    """Upper bound on ``|A|_2`` (square) or on ``|W^T W / g^2 - I|_2`` (tall); nan where the method
    needs none."""
    drift: float = math.nan
    """Bound on ``max |W^T W / g^2 - I|`` after a step of `rotate`, to be handed to the next one."""


def skew_gradient_(
    point: Tensor, gradient: Tensor, *, gain: float = 1.0, workspace: Workspace | None = None
) -> Tensor:
    """Replace the gradient of a square W by ``skew(W^T G) / gain``: its coordinates in the Lie
    algebra at W.

    Status: exact (Riemannian gradient of the left-invariant metric). Source: Edelman, Arias and
    Smith 1998, SIAM J. Matrix Anal. 20(2), sec. 2.2. An optimizer that acts elementwise turns a
    skew gradient into a skew step.

    Args:
        point: ([batch,] n, n) with ``W^T W = gain^2 I``. gradient: same shape, overwritten. gain:
            singular value of W.
        workspace: buffers to reuse.

    Returns:
        ``gradient``, now skew-symmetric.

    Raises:
        ShapeError: the matrices are not square or differ in shape.

    Cost: 1 GEMM.

    >>> import torch
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
    """Replace the gradient of a tall W by ``G - W sym(W^T G) / gain^2``: its projection on the
    tangent space at W.

    Status: exact (Euclidean metric). Source: Edelman, Arias and Smith 1998, eq. (2.4).

    Args:
        point: ([batch,] rows, columns), rows >= columns, ``W^T W = gain^2 I``. gradient: same
            shape, overwritten.
        gain: singular value of W. workspace: buffers to reuse.

    Returns:
        ``gradient``.

    Raises:
        ShapeError: the matrices are wide or differ in shape.

    Cost: 2 GEMM.

    >>> import torch
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
    """Move a square W along ``A = skew(step) / gain``: ``out = W exp(A) + O(|A|^3)``, ``out^T out =
    gain^2 I``.

    Status: to tolerance. The rung is chosen by bounds that hold in exact arithmetic. With p = ``I +
    A + A^2/2``, ``p^T p - I = A^4/4``; with the term ``A^3/8`` added (not /6: that of the Taylor
    series leaves ``A^4/12``) it is ``-A^6/64``. No entry of either is larger than the largest
    squared row norm of ``A^2/2``, or ``A^3/8``, so the cubic term is added where the quadratic
    would use up 0.4 of the tolerance. The defects of such steps add up, and before they reach the
    tolerance, ``E = W^T W / g^2 - I`` is measured and ``W (p - E/2)`` taken, which leaves at most
    ``b e + b^2 |E|_2 + e^2`` beside the step's own defect, for the largest row norms b, e of ``p -
    I`` and E. Where that is too much, ``W p`` is polished by Newton-Schulz. From ``|A|_2 > 1``
    (bound ``|A^2|^{1/2}``) on, ``W exp(A)`` is polished instead. The result stays on the component
    (sign of the determinant) of W. Source: `wellposed` (the ladder); Absil, Mahony and Sepulchre
    2008, Optimization Algorithms on Matrix Manifolds, ch. 4 (retractions).

    Args:
        point: ([batch,] n, n), nearly ``gain`` times orthogonal. step: same shape, the move an
            optimizer made, in the coordinates of `skew_gradient_`; its skew part is taken, and it
            is not changed unless it is ``out``.
        out: same shape, receives the result; must not overlap ``point``, and may be ``step``.
        gain: singular value of W. tolerance: largest accepted entry of ``|W^T W / gain^2 - I|``.
        drift: the ``drift`` of the retraction that made ``point``, if nothing touched it since: the
            correction, and its product, are then left out until such steps have used up the
            tolerance. None measures.
        workspace: buffers to reuse.

    Returns:
        `Retraction`; its ``drift`` is for the next call.

    Raises:
        ConvergenceError: the step or the point is not finite; ``out`` then holds ``point``.
        ShapeError: the matrices are not square or differ in shape.

    Cost: 2 GEMM up to about 0.1 radians, 3 up to 0.4, now and then one more; 5 for larger steps,
    about 10 with the exponential. All but the last of each are symmetric, which from 256 columns on
    saves a CPU a quarter of them.

    >>> import torch
    >>> point, out = torch.eye(2, dtype=torch.float64), torch.empty(2, 2, dtype=torch.float64)
    >>> move = torch.tensor([[0.0, -0.1], [0.1, 0.0]], dtype=torch.float64)
    >>> rotate(point, move, out=out).method, round(float(out[1, 0]), 3)
    ('corrected', 0.1)
    """
    _require(point, step, square=True)
    work = workspace or Workspace()
    # A = scale * skew; the factors are folded into the products, which saves passes over memory.
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
    # |A|_2^2 <= |A^2|_F <= sqrt(n) times its largest row, and so for A^3; the tighter bound costs two passes.
    size = (2.0 * half * math.sqrt(point.shape[-1])) ** 0.5
    # A row a of the skew A has |a|^2 = -(A^2)_ii.
    method, own, reach = "quadratic", half * half, math.sqrt(2.0 * half) + half
    is_large = False
    if own > 0.4 * budget:
        third = work("cubic", step.shape, point)
        _mirrored_product(skew, moved, out=third, alpha=0.25 * scale, sign=-1)  # A^3 / 8
        (row,) = work.bounds("third", _largest_row(third))
        method, own, reach = "cubic", row * row, reach + row
        size = min(size, 2.0 * (row * math.sqrt(point.shape[-1])) ** (1 / 3))
        if own > budget and size > QUADRATIC_LIMIT:
            limit = 0.5 * QUADRATIC_LIMIT**2
            (spread,) = work.bounds("spread", _spectral_bound(moved), below=limit)
            size = min(size, (2.0 * spread) ** 0.5)
            is_large = size > QUADRATIC_LIMIT
        moved.add_(third)
    if is_large:
        moved = torch.matrix_exp(skew * scale)
    else:
        moved.add_(skew, alpha=scale).diagonal(dim1=-2, dim2=-1).add_(1.0)  # p
    unseen = math.inf if drift is None else drift + own + _UNSEEN * tolerance
    if unseen <= budget:
        torch.matmul(point, moved, out=out)
        return Retraction(method, math.nan, unseen)
    if own <= budget:
        error = _error(point, gain, work)
        (e,) = work.bounds("drift", _largest_row(error), minimum=0.3 * tolerance)
        e2 = e * math.sqrt(point.shape[-1])  # bounds |E|_2
        left = own + reach * e * (1.0 + e2) + reach * reach * e2 + e * e * (0.75 + 0.25 * e2)
        if left <= budget:
            torch.matmul(point, moved.add_(error, alpha=-0.5), out=out)
            return Retraction("corrected", math.nan, left)
    torch.matmul(point, moved, out=out)
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
    """Replace a tall W by ``gain`` times its polar factor: ``W (I + E)^{-1/2}``, ``E = W^T W /
    gain^2 - I``.

    Status: to tolerance. The series ``I - E/2 + 3/8 E^2 - 5/16 E^3`` is formed on the small side
    and applied once; it leaves ``35/64 E^4 + O(E^5)``. If its row-norm bound exceeds the tolerance,
    measured Newton-Schulz steps follow; if no bound shows ``|E|_2 < 1``, the polar factor is taken
    by a float64 SVD. Source: Higham 2008, Functions of Matrices, sec. 8.3.

    Args:
        weight: ([batch,] rows, columns), rows >= columns, changed in place. gain: singular value
            wanted.
        tolerance: largest accepted entry of ``|W^T W / gain^2 - I|``. workspace: buffers to reuse.

    Returns:
        `Retraction`, with an upper bound on ``|E|_2`` (about twice the spectral size of the step
        taken).

    Raises:
        ConvergenceError: the weight is not finite (it is then left as it was). ShapeError: the
            matrix is wide.

    Cost: 2 GEMM and 2 products of columns^3.

    >>> import torch
    >>> weight = torch.eye(3, 2) + 0.01
    >>> retract_(weight).method
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
    """Take measured Newton-Schulz steps until the next error is certainly within tolerance; SVD
    outside the basin.

    Returns the method and a bound on the error it leaves, rounding apart.
    """
    for _ in range(_MAX_POLISH):
        error = _error(weight, gain, work)
        (row,) = work.bounds("row", _largest_row(error), below=_BASIN)
        if not math.isfinite(row):
            raise ConvergenceError(
                f"the step of a {tuple(weight.shape)} orthogonal weight is not finite"
            )
        # row <= |E|_2 <= sqrt(n) row; the dearer bounds are needed only between.
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


def _mirrored_product(
    left: Tensor, right: Tensor, *, out: Tensor, alpha: float, sign: int = 1
) -> None:
    """Write ``alpha * left @ right``, known to be symmetric, or skew-symmetric with sign -1."""
    size = out.shape[-1]
    if out.dim() > 2 or size < _PANELS_FROM or out.device.type != "cpu":
        _product(left, right, out=out, alpha=alpha)
        return
    width = max(_PANEL, size // 8)
    for start in range(0, size, width):
        rows = slice(start, start + width)
        _product(left[rows], right[:, start:], out=out[rows, start:], alpha=alpha)
        if start:
            torch.mul(out[:start, rows].mT, sign, out=out[rows, :start])


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
    """Return the largest row 2-norm over the batch; for symmetric X every entry of ``X^2`` is at
    most its square."""
    return torch.linalg.vector_norm(square, dim=-1).amax()


def _spectral_bound(symmetric: Tensor, squared: Tensor | None = None) -> Tensor:
    """Return an upper bound on ``|X|_2`` over the batch; with ``X^2`` at hand, the tighter one
    ``|X^2|^{1/2}``."""
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
