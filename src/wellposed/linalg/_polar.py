"""The nearest orthogonal matrix: polar factor by Newton-Schulz or by SVD, and how far a matrix is
from orthogonal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from wellposed.call_checks import checked_arguments
from wellposed.errors import ConfigError, ConvergenceError, ShapeError
from wellposed.options import Positive
from wellposed.tensor_calls import Once, is_transformed

PolarMethod = Literal["auto", "newton_schulz", "svd"]

# Newton-Schulz converges while every eigenvalue of W^T W lies in (0, 3); from |W^T W - I| < 1 on it
# does so from below.
BASIN = 0.95
MAX_STEPS = 60
_PRECISION = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-6, torch.bfloat16: 1e-6}


@contextlib.contextmanager
def full_precision(device_type: str = "cpu") -> Iterator[None]:
    """Run float32 matrix products in float32: no TF32, no bfloat16 shortcut, no autocast (Gram
    errors of 1e-3).

    Covers `torch.set_float32_matmul_precision`, `torch.backends.fp32_precision` and those of cuda
    and mkldnn (also inherited), `allow_tf32` and autocast. On leaving, by an exception too, each is
    as it was. Per process, not thread.
    """
    mkldnn: Any = torch.backends.mkldnn
    backends = (torch.backends.cuda.matmul, mkldnn.matmul)
    reduced = [(backend, backend.fp32_precision) for backend in backends]
    reduced = [(backend, value) for backend, value in reduced if value not in ("none", "ieee")]
    try:
        for backend, _ in reduced:
            backend.fp32_precision = "ieee"
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        for backend, value in reduced:
            # A setting inherited from a wider one must go on following it.
            backend.fp32_precision = "none"
            if backend.fp32_precision != value:
                backend.fp32_precision = value


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return float64 for float64 tensors and float32 for every other floating dtype."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


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
    point = weight.detach().to(torch.float32 if weight.device.type == "mps" else torch.float64)
    with full_precision(point.device.type):
        return minus_identity_(gram(tall(point)).div_(gain * gain)).abs().amax(dim=(-2, -1))


def tall(matrix: Tensor) -> Tensor:
    """Return the matrix, transposed (a view) when it has more columns than rows."""
    return matrix if matrix.shape[-2] >= matrix.shape[-1] else matrix.mT


def gram(matrix: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``W^T W``."""
    return torch.matmul(matrix.mT, matrix, out=out)


def minus_identity_(square: Tensor) -> Tensor:
    """Subtract I in place."""
    square.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    return square


def largest_row(square: Tensor) -> float:
    """Return the largest row 2-norm over the batch; for symmetric X every entry of ``X^2`` is at
    most its square."""
    return float(torch.linalg.vector_norm(square, dim=-1).max())


def spectral_bound(symmetric: Tensor, squared: Tensor | None = None) -> float:
    """Return an upper bound on ``|X|_2`` over the batch; with ``X^2`` at hand, the tighter one
    ``|X^2|^{1/2}``."""
    matrix = symmetric if squared is None else squared
    rows = matrix.abs().sum(dim=-1).amax(dim=-1)
    frobenius = torch.linalg.matrix_norm(matrix)
    bound = float(torch.minimum(rows, frobenius).max())
    return bound if squared is None else bound**0.5


def newton_schulz_(
    weight: Tensor, *, tolerance: float | None = None, max_steps: int = MAX_STEPS
) -> int:
    """Drive W to its polar factor in place: ``W <- W (3 I - W^T W) / 2`` until ``max |W^T W - I| <=
    tolerance``.

    Status: to tolerance (default 1e-6 in float32, 1e-12 in float64). The last step is not
    re-measured: after a step with error E the new error is ``-3/4 E^2 + 1/4 E^3``, whose entries
    are at most the squared row norm of E.
    Source: Bjorck and Bowie 1971, SIAM J. Numer. Anal. 8(2), the first-order case of eq. (3.1).

    Args:
        weight: (..., rows, columns), float32 or float64, changed in place; wide matrices get
            orthonormal rows. All singular values must lie in (0, sqrt 3), or the iteration cannot
            reach this matrix's polar factor.
        tolerance: the largest accepted entry of ``|W^T W - I|``.
        max_steps: iterations before giving up.

    Returns:
        The number of steps taken.

    Raises:
        ConvergenceError: not reached within ``max_steps``; W then holds the last iterate.
        ShapeError: not a matrix, or not float32 / float64.

    Cost: two products of rows x columns x smaller side per step. From ``|E|_2`` = 0.1, 2 steps; use
    `polar` when the matrix may be far from orthogonal.

    >>> import torch
    >>> weight = torch.eye(4) + 0.05 * torch.ones(4, 4)
    >>> newton_schulz_(weight) <= 4, bool(isometry_error(weight) < 1e-6)
    (True, True)
    """
    _require_matrix("newton_schulz_", weight)
    if weight.dtype not in (torch.float32, torch.float64):
        raise ShapeError(
            f"newton_schulz_ works on float32 or float64, received {weight.dtype}; use"
            " polar(weight)"
        )
    limit = _PRECISION[weight.dtype] if tolerance is None else tolerance
    point = tall(weight.detach())
    step, worst = 0, float("inf")
    with torch.no_grad(), full_precision(weight.device.type):
        for step in range(max_steps + 1):
            error = minus_identity_(gram(point))
            worst = float(error.abs().max())
            if worst <= limit:
                return step
            if step == max_steps or not worst < float("inf"):
                break
            row = largest_row(error)
            point.sub_(point @ error, alpha=0.5)
            if row < 1.0 and row * row <= 0.5 * limit:
                return step + 1
    raise ConvergenceError(
        f"newton_schulz_: max |W^T W - I| is {worst:.3g} after {step} steps, expected <="
        f" {limit:.3g}; every singular value of the {tuple(weight.shape)} matrix must lie in (0,"
        " sqrt 3): use polar(weight, method='svd')"
    )


@checked_arguments
def polar(weight: Tensor, *, method: PolarMethod = "auto") -> Tensor:
    """Return the polar factor U of ``W = U H``: the isometry nearest to W in every unitarily
    invariant norm.

    Status: to tolerance: max |U^T U - I| <= 1e-6 in float32, 1e-12 in float64; half types are
    computed in float32 and rounded once. Source: Fan and Hoffman 1955, Proc. AMS 6 (nearest unitary
    matrix); Higham 2008, Functions of Matrices, ch. 8. Differentiable: with ``W = P S V^T``, the
    gradient is ``P K V^T + (I - P P^T) G V S^-1 V^T``, ``K_ij = (P^T G V - V^T G^T P)_ij / (s_i +
    s_j)``.

    Args:
        weight: (..., rows, columns), floating. Wide matrices get orthonormal rows.
        method: ``"newton_schulz"`` scales by an upper bound of the spectral norm and iterates
            (matrix products only); ``"svd"`` factors in float64; ``"auto"`` iterates when a bound
            shows W near enough, and factors otherwise.

    Returns:
        (..., rows, columns) in the dtype of ``weight``. A singular W has many nearest isometries;
        one is returned by ``"svd"``.

    Raises:
        ShapeError: not a matrix. ConfigError: unknown method.
        ConvergenceError: ``"newton_schulz"`` on a (nearly) singular matrix, or W is not finite.

    Cost: 2 to 8 Gram-size products near an isometry, an SVD away from it or when a gradient is
    wanted. Not for every
    forward pass: see `wellposed.constrain`.

    >>> import torch
    >>> polar(torch.diag(torch.tensor([2.0, -0.5]))).tolist()
    [[1.0, 0.0], [0.0, -1.0]]
    """
    if is_transformed():
        raise ConfigError(
            "polar: torch.func and forward-mode differentiation have no rule for it; take backward()"
        )
    _require_matrix("polar", weight, is_finite=True)
    if torch.is_grad_enabled() and weight.requires_grad:
        return cast(Tensor, _Polar.apply(weight))
    with full_precision(weight.device.type):
        return _polar(weight.detach(), method)


def _polar(weight: Tensor, method: PolarMethod) -> Tensor:
    point = weight.to(compute_dtype(weight), copy=True)
    if method == "auto":
        error = minus_identity_(gram(tall(point)))
        method = "newton_schulz" if spectral_bound(error, error @ error) < BASIN else "svd"
    elif method == "newton_schulz":
        square = gram(tall(point))
        point.div_(
            max(spectral_bound(square, square @ square) ** 0.5, torch.finfo(point.dtype).tiny)
        )
    if method == "newton_schulz":
        newton_schulz_(point)
        return point.to(weight.dtype)
    left, _, right = factor(weight)
    return (left @ right).to(weight.dtype)


def factor(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the thin SVD in float64 (float32 on devices without it)."""
    wide = torch.float32 if weight.device.type == "mps" else torch.float64
    left, values, right = torch.linalg.svd(weight.detach().to(wide), full_matrices=False)
    return left, values, right


class _Polar(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        left, values, right = factor(weight)
        ctx.save_for_backward(left, values, right, weight)
        return (left @ right).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        left, values, right, weight = ctx.saved_tensors
        outer = gradient.to(left.dtype)
        inner = left.mT @ outer @ right.mT
        skew = (inner - inner.mT) / (values.unsqueeze(-1) + values.unsqueeze(-2))
        result = left @ skew @ right
        rows, columns = gradient.shape[-2:]
        if rows > columns:
            result = result + ((outer @ right.mT - left @ inner) / values.unsqueeze(-2)) @ right
        elif rows < columns:
            result = result + left @ ((left.mT @ outer - inner @ right) / values.unsqueeze(-1))
        result = result.to(gradient.dtype)
        if not torch.is_grad_enabled():
            return result
        problem = (
            "polar has no second derivative; U @ Vh of torch.linalg.svd has one, if the singular"
            " values differ"
        )
        return Once.apply(problem, result, weight)


class NearestOrthogonal(NamedTuple):
    """The nearest gain-scaled isometry of a matrix, and the distance to it."""

    weight: Tensor
    """(rows, columns): ``gain * U``."""
    gain: float
    """The common singular value."""
    moved_frobenius: float
    """``|W' - W|_F / |W|_F``."""
    moved_spectral: float
    """``|W' - W|_2 / |W|_2``."""


@checked_arguments
def nearest_orthogonal(
    weight: Tensor, *, gain: Positive | Literal["fit"] = 1.0
) -> NearestOrthogonal:
    """Find the matrix nearest to W among those with ``W'^T W' = gain^2 I``, and report how far it
    is.

    Status: to tolerance (float64 SVD, rounded to the weight's dtype). Source: Fan and Hoffman 1955;
    with ``gain="fit"`` the best gain is the mean singular value, because ``|W - g U|_F^2 = sum (s_i
    - g)^2``.

    Args:
        weight: (rows, columns), floating.
        gain: the singular value wanted, above 0, or ``"fit"`` for the one that moves W least.

    Returns:
        `NearestOrthogonal`.

    Raises:
        ShapeError: not two-dimensional. ConfigError: gain not above 0. ConvergenceError: W is not
            finite, or zero while ``gain="fit"``.

    Cost: one SVD. Not for use inside training: `polar` is cheaper near an isometry.

    >>> import torch
    >>> found = nearest_orthogonal(torch.diag(torch.tensor([3.0, 1.0])), gain="fit")
    >>> found.gain, found.weight.tolist(), round(found.moved_frobenius, 3)
    (2.0, [[2.0, 0.0], [0.0, 2.0]], 0.447)
    """
    if weight.dim() != 2:
        raise ShapeError(
            f"nearest_orthogonal: expected a matrix (rows, columns), received {tuple(weight.shape)}"
        )
    _require_matrix("nearest_orthogonal", weight, is_finite=True)
    with full_precision(weight.device.type):
        left, values, right = factor(weight)
        chosen = float(values.mean()) if gain == "fit" else gain
        if chosen <= 0.0:
            raise ConvergenceError(
                "nearest_orthogonal: the matrix is zero, so gain='fit' has nothing to fit"
            )
        moved = (values - chosen).abs()
        tiny = torch.finfo(values.dtype).tiny
        return NearestOrthogonal(
            weight=((left * chosen) @ right).to(weight.dtype),
            gain=chosen,
            moved_frobenius=float(moved.norm() / values.norm().clamp_min(tiny)),
            moved_spectral=float(moved.max() / values.max().clamp_min(tiny)),
        )


def _require_matrix(name: str, weight: Tensor, *, is_finite: bool = False) -> None:
    if weight.dim() < 2 or not weight.is_floating_point():
        raise ShapeError(
            f"{name}: expected a floating tensor (..., rows, columns), received {weight.dtype}"
            f" {tuple(weight.shape)}"
        )
    if is_finite and not bool(torch.isfinite(weight.detach()).all()):
        raise ConvergenceError(
            f"{name}: the {tuple(weight.shape)} matrix holds values that are not finite"
        )
