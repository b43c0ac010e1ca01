"""The Cayley map in inverse form, for square and tall matrices, with an analytic backward pass."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from wellposed.errors import ConvergenceError, ShapeError
from wellposed.tensor_calls import is_transformed, with_graph


def cayley(free: Tensor) -> Tensor:
    """Map any X to ``Q`` with ``Q^T Q = I``: the first columns of ``(I - A/2)^{-1} (I + A/2)``.

    For square X, ``A = X - X^T`` and ``Q = 2 (I - A/2)^{-1} - I``. For tall ``X = [X1; X2]``,
    ``A = [[X1 - X1^T, -X2^T], [X2, 0]]``, and only a small inverse is needed: with
    ``T = I - (X1 - X1^T)/2 + X2^T X2 / 4``, ``Q = [2 T^{-1} - I; X2 T^{-1}]``. ``cayley(0) = [I;
    0]``.

    Status: to tolerance (1.5e-6 in float32 at ``|A|`` about 1; the error grows with ``|A|``).
    Source: Cayley 1846; Helfrich, Willmott and Ye 2018, arXiv:1707.09520 (square); Wen and Yin
    2013, Math. Program. 142, lemma 4 (low rank). The backward pass is ``dQ = K dA K``, ``K = (I -
    A/2)^{-1}``: products only, no second solve; to differentiate it again, the map is computed
    once more by autograd.

    Args:
        free: (rows, columns), rows >= columns, float32 or float64, any values.

    Returns:
        (rows, columns) with orthonormal columns; for square X a rotation (determinant +1) without
        eigenvalue -1.
        Others need a base: ``base @ cayley(X)``.

    Raises:
        ShapeError: not a matrix, or wide.

    Cost: forward one inverse of columns^3; backward two products (square). Not for weights that
    must pass eigenvalue -1 during training: the map runs to infinity there; move the base (see
    `wellposed.constrain.orthogonal`).

    >>> import torch
    >>> Q = cayley(torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
    >>> [[round(value, 3) for value in row] for row in Q.tolist()]
    [[0.6, 0.8], [-0.8, 0.6]]
    """
    _require(free)
    return _mapped(free, None)


def based_cayley(free: Tensor, base: Tensor) -> Tensor:
    """Map a square X to ``B cayley(X)``; the product is part of the analytic backward pass (still
    two products).

    Status, source, errors: as `cayley`. With B orthogonal it reaches every orthogonal matrix near
    B, of either sign.

    Args:
        free: (n, n). base: (n, n), orthogonal; gets no gradient.

    Returns:
        (n, n), orthogonal.

    Raises:
        ShapeError: the shapes are not square or differ.

    Cost: `cayley` and one product.

    >>> import torch
    >>> mirror = torch.diag(torch.tensor([1.0, -1.0]))
    >>> based_cayley(torch.zeros(2, 2), mirror).tolist()
    [[1.0, 0.0], [0.0, -1.0]]
    """
    _require(free)
    if free.shape != base.shape or free.shape[0] != free.shape[1]:
        raise ShapeError(
            f"based_cayley: expected equal square shapes, received {tuple(free.shape)},"
            f" {tuple(base.shape)}"
        )
    return _mapped(free, base)


def inverse_cayley(isometry: Tensor) -> Tensor:
    """Return an X with ``cayley(X) = Q``, for Q with orthonormal columns whose top square has no
    eigenvalue -1.

    Status: to tolerance; conditioning worsens as ``Q1 + I`` becomes singular. Source: the maps of
    `cayley`, solved.

    Args:
        isometry: (rows, columns), rows >= columns, orthonormal columns.

    Returns:
        (rows, columns), with a skew top square.

    Raises:
        ConvergenceError: Q is out of the map's reach (eigenvalue -1, such as any reflection).
        ShapeError: wide.

    Cost: one inverse.

    >>> import torch
    >>> X = torch.tensor([[0.0, 0.3], [-0.3, 0.0], [0.5, 0.2]], dtype=torch.float64)
    >>> torch.allclose(inverse_cayley(cayley(X)), X)
    True
    """
    _require(isometry)
    columns = isometry.shape[1]
    identity = torch.eye(columns, dtype=isometry.dtype, device=isometry.device)
    small = (isometry[:columns] + identity) / 2
    smallest = float(torch.linalg.svdvals(small.detach().double())[-1])
    if smallest < 1e-4:
        raise ConvergenceError(
            "inverse_cayley: the matrix is out of reach of the Cayley map (the least singular"
            f" value of (Q + I)/2 is {smallest:.2g}, expected at least 1e-4: an eigenvalue is -1,"
            " as in a reflection); use a base"
        )
    inverse = torch.linalg.inv(small)
    bottom = isometry[columns:] @ inverse
    half_skew = identity + bottom.mT @ bottom / 4 - inverse
    return torch.cat([(half_skew - half_skew.mT) / 2, bottom])


def _mapped(free: Tensor, base: Tensor | None) -> Tensor:
    if is_transformed():
        return _Cayley.forward(free, None if base is None else base.detach())[0]
    return cast(tuple[Tensor, Tensor], _Cayley.apply(free, base))[0]


class _Cayley(torch.autograd.Function):
    @staticmethod
    def forward(free: Tensor, base: Tensor | None) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        columns = free.shape[1]
        top, bottom = free[:columns], free[columns:]
        system = (top.mT - top).div_(2)
        if bottom.shape[0]:
            system = torch.addmm(system, bottom.mT, bottom, alpha=0.25)
        system.diagonal().add_(1.0)
        kernel = torch.linalg.inv_ex(system)[0]
        if base is not None:
            return torch.addmm(base, base, kernel, beta=-1.0, alpha=2.0), kernel
        upper = 2.0 * kernel
        upper.diagonal().sub_(1.0)
        return (torch.cat([upper, bottom @ kernel]) if bottom.shape[0] else upper), kernel

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        free, base = inputs
        result, kernel = output
        ctx.mark_non_differentiable(kernel)
        if base is None:
            ctx.save_for_backward(free, kernel)
        else:
            ctx.save_for_backward(free, kernel, base, result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _kernel: Tensor | None) -> tuple[Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        free, kernel = ctx.saved_tensors[:2]
        if torch.is_grad_enabled():
            base = ctx.saved_tensors[2] if len(ctx.saved_tensors) == 4 else None
            return with_graph(lambda free: _Cayley.forward(free, base)[0], [free], gradient)[
                0
            ], None
        columns = free.shape[1]
        if len(ctx.saved_tensors) == 4:
            base, result = ctx.saved_tensors[2:]
            # B K = (Q + B) / 2, so B needs no product of its own.
            inner = (result + base).mT @ gradient @ kernel.mT
            return (inner - inner.mT) / 2, None
        bottom = free[columns:]
        upper = 2.0 * gradient[:columns]
        if bottom.shape[0]:
            upper = upper + bottom.mT @ gradient[columns:]
        inner = kernel.mT @ upper @ kernel.mT
        top_gradient = (inner - inner.mT) / 2
        if not bottom.shape[0]:
            return top_gradient, None
        bottom_gradient = gradient[columns:] @ kernel.mT - bottom @ (inner + inner.mT) / 4
        return torch.cat([top_gradient, bottom_gradient]), None


def _require(free: Tensor) -> None:
    if free.dim() != 2 or free.shape[0] < free.shape[1]:
        raise ShapeError(
            f"cayley: expected (rows, columns) with rows >= columns, received {tuple(free.shape)}"
        )
