"""How far weights are from orthogonal, as numbers that carry gradient.

Shape legend: W is (m, n) = (out_features, in_features); a stack of weights shares n and adds up to
m rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from wellposed.errors import ConfigError, ConvergenceError, ShapeError
from wellposed.linalg import gathered, is_sharded, mean_over_ranks
from wellposed.tensor_calls import is_transformed, with_graph

Side = Literal["columns", "rows"]


def gram_penalty(
    weight: Tensor | Sequence[Tensor],
    *,
    squared: bool = True,
    side: Side = "columns",
    gram_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``|W^T W - I|_F^2`` (``side="columns"``) or ``|W W^T - I|_F^2`` (``"rows"``);
    unsquared on request.

    Status: a penalty, exact to rounding; zero if and only if the columns (rows) are orthonormal,
    which a wide (tall) weight cannot reach: its least value is the difference of the two sizes.

    Method: the smaller Gram matrix only, by ``|W^T W - I|_F^2 = |W W^T - I|_F^2 + n - m`` for W of
    shape (m, n); value and gradient ``4 W (W^T W - I)`` are one fused autograd function, two matrix
    products in all.
    Squared columns: Zhang et al. (2021, sec. 2.1); unsquared rows: McGrath (2024, eq. 2).

    Args:
        weight: shape (m, n), floating point; or several of equal n, which stand for their stack
            along outputs (zhang2021's P) without being copied together.
        squared: False gives the norm itself, with gradient zero at an orthogonal weight.
        side: which of the two Gram matrices is compared with the identity.
        gram_dtype: dtype of the two matrix products, for example ``torch.bfloat16``; the default is
            the weight's, at least float32. bf16 makes the gradient wrong by 0.5 % far from, and 8 %
            near, an orthogonal weight.

    Returns:
        a scalar, at least float32.

    Raises:
        ShapeError: not a matrix, or weights of different widths or devices.
        ConfigError: integer (quantised) weights, or float16 on a CPU.

    Cost: 4 m n min(m, n) FLOPs for value and gradient; memory min(m, n)^2. On row shards (DTensor,
    FSDP2) the n x n Gram matrices of the shards are summed by one all-reduce and the full weight is
    never gathered; a slice of a fused weight across shards is. As FSDP2 does, the gradient is that
    of the mean of the losses of all ranks.

    When not to use: for exact orthogonality use `wellposed.constrain_`.

    >>> gram_penalty(2 * torch.eye(3)).item()  # three times (4 - 1)^2
    27.0
    """
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    check_weights(weights)
    if side not in ("columns", "rows"):
        raise ConfigError(f"gram_penalty: side = {side!r}, expected 'columns' or 'rows'")
    plan, local = _Plan.of(weights, gram_dtype)
    value: Tensor = (_plain if is_transformed() else _Gram.apply)(plan, *local)  # type: ignore[assignment]
    value = value + plan.missing(weights, side)
    return mean_over_ranks(value if squared else _root(value), weights)


def qr_penalty(
    weight: Tensor, method: Literal["householder", "gram_schmidt"] = "householder"
) -> Tensor:
    """Return ``|Q - W|_F`` where ``W = Q R``, Q with orthonormal columns and R upper triangular.

    Status: a penalty, exact to rounding. Its gradient goes through the factorisation. For a wide W
    the factors are those of W^T.

    Method: McGrath (2024, eq. 1). ``householder`` is LAPACK's, whose R may have a negative
    diagonal, so the target Q may be far from W; ``gram_schmidt`` is the Q that Gram-Schmidt gives,
    of the R with a positive diagonal.

    Args:
        weight: shape (m, n), floating point, of full rank.
        method: how Q is computed; the two differ by the signs of columns.

    Returns:
        a scalar, at least float32.

    Raises:
        ShapeError: not a matrix. ConfigError: quantised weight, float16 on a CPU, unknown method.
        ConvergenceError: the weight is rank deficient, so Q is not defined.

    Cost: about 4 m n^2 FLOPs.

    When not to use: McGrath reports that both forms halve accuracy; `gram_penalty` is cheaper and
    trains.

    >>> round(qr_penalty(torch.diag(torch.tensor([1.0, 3.0])), "gram_schmidt").item(), 4)  # Q = I
    2.0
    """
    if method not in ("householder", "gram_schmidt"):
        raise ConfigError(
            f"qr_penalty: method = {method!r}, expected 'householder' or 'gram_schmidt'"
        )
    check_weights([weight])
    given, weight = weight, gathered(weight)
    matrix = weight if weight.shape[0] >= weight.shape[1] else weight.t()
    matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    with torch.autocast(matrix.device.type, enabled=False):
        q, r = torch.linalg.qr(matrix)
        if method == "gram_schmidt":
            q = q * r.detach().diagonal().sign()
        diagonal = r.detach().diagonal().abs()
        if not bool(diagonal.min() > torch.finfo(r.dtype).eps * diagonal.max()):
            raise ConvergenceError(
                f"qr_penalty: a weight of shape {tuple(weight.shape)} is rank deficient, so its"
                " factor Q is not defined; use form='gram_squared', or initialise the weight"
            )
        return mean_over_ranks(_root((q - matrix).square().sum()), [given])


def check_weights(weights: Sequence[Tensor]) -> None:
    """Raise for what no orthogonality penalty can be computed on; all offenders in one message."""
    if not weights:
        raise ShapeError("a penalty needs at least one weight, received none")
    for weight in weights:
        if weight.ndim != 2:
            raise ShapeError(
                "orthogonality is a property of matrices; received a tensor of shape"
                f" {tuple(weight.shape)}"
            )
        if not weight.is_floating_point():
            raise ConfigError(
                f"a {weight.dtype} weight of shape {tuple(weight.shape)} is quantised: it has no"
                " gradient to penalise; penalise the model before it is quantised"
            )
        if weight.dtype == torch.float16 and weight.device.type == "cpu":
            raise ConfigError(
                f"a float16 weight of shape {tuple(weight.shape)} on a CPU: Gram matrices overflow"
                " at 65504 there; use bfloat16 or float32"
            )
    if len({(weight.shape[1], weight.device) for weight in weights}) > 1:
        shapes = ", ".join(f"{tuple(weight.shape)} on {weight.device}" for weight in weights)
        raise ShapeError(
            f"weights to be stacked along outputs need one width and one device; received {shapes}"
        )


@dataclass(frozen=True)
class _Plan:
    """Which Gram matrix is formed (W^T W or W W^T), in which dtype, and over which process groups
    those of local blocks are summed."""

    by_columns: bool
    dtype: torch.dtype
    groups: tuple[Any, ...] = ()

    @classmethod
    def of(
        cls, weights: Sequence[Tensor], dtype: torch.dtype | None
    ) -> tuple[_Plan, Sequence[Tensor]]:
        """Choose the plan for these weights; return it with the weights, or local blocks of sharded ones."""
        dtype = dtype or torch.promote_types(weights[0].dtype, torch.float32)
        if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError(
                f"gram_dtype = {dtype}, which has no products with a gradient; expected"
                " torch.bfloat16, float16, float32 or float64"
            )
        is_tall = sum(map(len, weights)) >= weights[0].shape[1]
        if not any(is_sharded(weight) for weight in weights):
            return cls(is_tall, dtype), weights
        first, *others = {tuple(getattr(weight, "placements", ())) for weight in weights}
        dims = {placement.dim for placement in first if placement.is_shard()}
        if others or len(dims) > 1 or any(placement.is_partial() for placement in first):
            # Not one common direction: gather, which autograd turns into a scatter of the gradient.
            return cls(is_tall, dtype), [gathered(weight) for weight in weights]
        mesh: Any = weights[0].device_mesh  # type: ignore[attr-defined]
        cut = [index for index, placement in enumerate(first) if placement.is_shard()]
        groups = tuple(mesh.get_group(index) for index in cut)
        local = [weight.to_local() for weight in weights]  # type: ignore[attr-defined]
        return cls(dims == {0} if dims else is_tall, dtype, groups), local

    def missing(self, weights: Sequence[Tensor], side: Side) -> int:
        """Return what to add to the penalty of the Gram matrix formed to get that of ``side``."""
        more = weights[0].shape[1] - sum(map(len, weights))
        return more * ((side == "columns") - self.by_columns)


def _gram_minus_identity(plan: _Plan, weights: Sequence[Tensor]) -> Tensor:
    with torch.autocast(weights[0].device.type, enabled=False):
        cast = [weight.to(plan.dtype) for weight in weights]
        if plan.by_columns:
            gram = cast[0].t() @ cast[0]
            for item in cast[1:]:
                gram.addmm_(item.t(), item)
        else:
            stack = cast[0] if len(cast) == 1 else torch.cat(cast)
            gram = stack @ stack.t()
        gram = gram.to(torch.promote_types(weights[0].dtype, torch.float32))
        for group in plan.groups:
            torch.distributed.all_reduce(gram, group=group)
        gram.diagonal().sub_(1)
    return gram


@torch.no_grad()
def accumulate_gram_penalty_(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    *,
    strength: float,
    squared: bool,
    side: Side,
    gram_dtype: torch.dtype | None,
) -> Tensor:
    """Add the gradient of ``strength * gram_penalty(weights)`` to ``gradients`` in place, without a
    graph.

    Returns the penalty, strength included. A weight whose entry in ``gradients`` is None is frozen.
    """
    plan, _ = _Plan.of(weights, gram_dtype)
    gram = _gram_minus_identity(plan, weights)
    value = torch.dot(gram.view(-1), gram.view(-1)) + plan.missing(weights, side)
    # Of |G|^2 by W, times 1 / (2 |G|) for the norm itself.
    slope = torch.full_like(value, 4 * strength)
    if not squared:
        value = _root(value)
        slope = torch.where(value == 0, 0.0, slope / (2 * value))
    products = _products(plan, weights, gram.mul_(slope).to(plan.dtype))
    with torch.autocast(gram.device.type, enabled=False):
        for (left, right), gradient in zip(products, gradients, strict=True):
            if gradient is not None and gradient.dtype == left.dtype:
                gradient.addmm_(left, right)
            elif gradient is not None:
                gradient.add_((left @ right).to(gradient.dtype))
    return strength * value


def _products(
    plan: _Plan, weights: Sequence[Tensor], scaled: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the two factors of the gradient of each weight: ``W S``, or its rows of ``S`` and the stack."""
    cast = [weight.to(scaled.dtype) for weight in weights]
    if plan.by_columns:
        yield from ((weight, scaled) for weight in cast)
        return
    stack = cast[0] if len(cast) == 1 else torch.cat(cast)
    yield from ((rows, stack) for rows in scaled.split([len(weight) for weight in cast]))


class _Gram(torch.autograd.Function):
    """|G|_F^2 for a Gram matrix minus identity, with gradient ``4 W G`` or ``4 G W``."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *weights: Tensor) -> Tensor:
        ctx.plan = plan
        gram = _gram_minus_identity(plan, weights)
        ctx.save_for_backward(gram, *weights)
        return torch.dot(gram.view(-1), gram.view(-1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gram, *weights = ctx.saved_tensors
        if torch.is_grad_enabled():
            if ctx.plan.groups:
                raise ConfigError(
                    "gram_penalty: no second derivative of weights in shards; gather them"
                )
            return None, *with_graph(partial(_plain, ctx.plan), weights, grad)
        with torch.autocast(gram.device.type, enabled=False):
            scaled = (gram * (4 * grad)).to(ctx.plan.dtype)
            grads = [left @ right for left, right in _products(ctx.plan, weights, scaled)]
        return None, *(item.to(weight.dtype) for item, weight in zip(grads, weights, strict=True))


def _plain(plan: _Plan, *weights: Tensor) -> Tensor:
    """The value of `_Gram`, by operations that autograd knows."""
    return _gram_minus_identity(plan, [torch.cat(weights)]).square().sum()


def _root(value: Tensor) -> Tensor:
    """Return sqrt with gradient 0 at 0: the norm's subgradient of least length."""
    # Written so that what is no number stays none.
    safe = torch.where(value <= 0, 1.0, value)
    return torch.where(value <= 0, 0.0, safe.sqrt())
