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
from wellposed.linalg._tensors import full_precision, tall
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


def isometry_error(weight: Tensor, *, gain: float = 1.0) -> Tensor:
    """Measure ``max |W^T W / gain^2 - I|`` (``W W^T`` if wide): zero exactly when W is ``gain``
    times an isometry.

    Status: exact up to the rounding of one Gram product, which is taken in float64 (float32 on
    devices without it).

    Args:
        weight: (..., rows, columns), floating; the Gram matrix of the smaller side is used.
        gain: the common singular value a perfect matrix would have; above 0.

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

    Status: to tolerance (float64 SVD, rounded to the weight's dtype). Source: Fan and Hoffman 1955,
    Proc. AMS 6. The gain that moves W least is its mean singular value, because ``|W - g U|_F^2 =
    sum (s_i - g)^2``.

    Args:
        weight: (..., rows, columns), floating; wide matrices get orthonormal rows.
        gain: the singular value wanted, above 0.

    Returns:
        (..., rows, columns) in the dtype of ``weight``, without gradient. A singular W has many
        nearest isometries; one is returned.

    Raises:
        ShapeError: no matrix. ConfigError: gain not above 0. ConvergenceError: W is not finite.

    Cost: one SVD. Not for use inside training: see `wellposed.constrain`.

    >>> import torch
    >>> nearest_orthogonal(torch.diag(torch.tensor([2.0, -0.5]))).tolist()
    [[1.0, 0.0], [0.0, -1.0]]
    """
    _require_matrix("nearest_orthogonal", weight)
    if not bool(torch.isfinite(weight.detach()).all()):
        raise ConvergenceError(
            f"nearest_orthogonal: the {tuple(weight.shape)} matrix holds values that are not finite"
        )
    with full_precision(weight.device.type):
        left, _, right = factor(weight)
        return ((left * gain) @ right).to(weight.dtype)


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


class Workspace:
    """Buffers that are allocated once for each shape, so that a training step allocates nothing.

    >>> import torch
    >>> work = Workspace()
    >>> work("gram", (2, 2), torch.zeros(1)) is work("gram", (2, 2), torch.zeros(1))
    True
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...], torch.dtype, torch.device], Tensor] = {}

    def __call__(
        self, name: str, shape: tuple[int, ...] | torch.Size, like: Tensor, *, padded: bool = False
    ) -> Tensor:
        """Return the buffer ``name`` of this shape, in the dtype and on the device of ``like``;
        contents are stale.

        Of a padded buffer the rows lie 16 entries further apart: reading columns of a matrix whose
        rows are a power of two apart falls into few cache sets (on a CPU, a transposed pass at n =
        512 costs half as much with padding).
        """
        key = (name, tuple(shape), like.dtype, like.device)
        if key not in self._buffers:
            width = shape[-1] + (16 if padded else 0)
            buffer = torch.empty((*shape[:-1], width), dtype=like.dtype, device=like.device)
            self._buffers[key] = buffer[..., : shape[-1]]
        return self._buffers[key]


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
    half = _largest_row(moved)
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
        row = _largest_row(third)
        method, own, reach = "cubic", row * row, reach + row
        size = min(size, 2.0 * (row * math.sqrt(point.shape[-1])) ** (1 / 3))
        if own > budget and size > QUADRATIC_LIMIT:
            size = min(size, (2.0 * _spectral_bound(moved)) ** 0.5)
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
        error, e = _error(point, gain, work)
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
    error, _ = _error(weight, gain, work)
    squared = torch.matmul(error, error, out=work("square", error.shape, weight))
    size = _spectral_bound(error, squared)
    if not math.isfinite(size):
        raise ConvergenceError(
            f"the step of a {tuple(weight.shape)} orthogonal weight is not finite"
        )
    if size >= _BASIN:
        return Retraction(_svd_(weight, gain), size)
    e2 = _largest_row(squared)
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
        error, row = _error(weight, gain, work)
        if not math.isfinite(row):
            raise ConvergenceError(
                f"the step of a {tuple(weight.shape)} orthogonal weight is not finite"
            )
        # row <= |E|_2 <= sqrt(n) row; the dearer bounds are needed only between.
        if row >= _BASIN or (
            row * math.sqrt(weight.shape[-1]) >= _BASIN
            and _spectral_bound(error) >= _BASIN
            and _spectral_bound(error, error @ error) >= _BASIN
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


def _error(weight: Tensor, gain: float, work: Workspace) -> tuple[Tensor, float]:
    """Return ``E = W^T W / g^2 - I`` and its largest row norm."""
    error = work("gram", _small_shape(weight), weight)
    _mirrored_product(weight.mT, weight, out=error, alpha=1.0 / (gain * gain))
    return _minus_identity_(error), _largest_row(error)


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


def _largest_row(square: Tensor) -> float:
    """Return the largest row 2-norm over the batch; for symmetric X every entry of ``X^2`` is at
    most its square."""
    return float(torch.linalg.vector_norm(square, dim=-1).max())


def _spectral_bound(symmetric: Tensor, squared: Tensor | None = None) -> float:
    """Return an upper bound on ``|X|_2`` over the batch; with ``X^2`` at hand, the tighter one
    ``|X^2|^{1/2}``."""
    matrix = symmetric if squared is None else squared
    rows = matrix.abs().sum(dim=-1).amax(dim=-1)
    frobenius = torch.linalg.matrix_norm(matrix)
    bound = float(torch.minimum(rows, frobenius).max())
    return bound if squared is None else bound**0.5


def wide(weight: Tensor) -> Tensor:
    """Return the values in float64 (float32 on devices without it)."""
    return weight.detach().to(torch.float32 if weight.device.type == "mps" else torch.float64)


def _require_matrix(name: str, weight: Tensor) -> None:
    if weight.dim() < 2 or not weight.is_floating_point():
        raise ShapeError(
            f"{name}: expected a floating tensor (..., rows, columns), received {weight.dtype}"
            f" {tuple(weight.shape)}"
        )
