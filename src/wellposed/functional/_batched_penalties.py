"""How far matrices are from orthogonal that one tensor holds, as the experts of a layer do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wellposed.functional._penalties import (
    Side,
    check_gram_dtype,
    gram_minus_identity,
    gram_product_dtype,
    root,
    sums_of_squares,
)
from wellposed.linalg import compute_dtype, in_stacks
from wellposed.tensor_calls import is_transformed, with_graph

# Most entries of Gram matrices in one batch, and of a copy in another dtype.
_ENTRIES = 1 << 24


def batched_gram_penalties(
    batches: Sequence[Tensor], *, squared: bool, side: Side, gram_dtype: torch.dtype | None
) -> list[tuple[list[int], Tensor]]:
    """Return `gram_penalty` of each matrix of tensors (count, m, n): per kind of tensor, their
    indices and the values of all their matrices, in order.

    Status and Args: as `gram_penalty`. A kind has one m, n, dtype and device; tensors in shards are
    not taken.

    Cost: two products a tensor, which is never copied unless ``gram_dtype`` is not its dtype, and
    some launches a kind. Gradients come as one tensor, so time is linear in count; that of
    ``tensor[i]`` fills a tensor of all matrices for each i. A kind has at most 2^24 entries of Gram
    matrices, or one tensor.

    >>> experts = torch.stack([torch.eye(3), 2 * torch.eye(3)])
    >>> options = {"squared": True, "side": "columns", "gram_dtype": None}
    >>> [(places, v.tolist()) for places, v in batched_gram_penalties([experts], **options)]
    [([0], [0.0, 27.0])]
    """
    results = []
    for places in _alike(batches):
        some = [batches[place] for place in places]
        plan = _Plan.of(some[0], gram_dtype)
        values: Tensor = (_plain if is_transformed() else _BatchedGram.apply)(plan, *some)  # type: ignore[assignment]
        values = values + plan.missing * ((side == "columns") - plan.by_columns)
        results.append((places, values if squared else root(values)))
    return results


def _alike(batches: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the indices of tensors that are computed together."""

    def kind(place: int) -> tuple[Any, ...]:
        some = batches[place]
        return some.requires_grad, some.shape[1:], some.dtype, some.device

    def size(place: int) -> int:
        count, rows, columns = batches[place].shape
        return _ENTRIES // (count * min(rows, columns) ** 2)

    yield from in_stacks(range(len(batches)), kind, size)


@dataclass(frozen=True)
class _Plan:
    """How matrices of one shape are computed."""

    missing: int  # columns - rows
    by_columns: bool  # W^T W, not W W^T
    dtype: torch.dtype  # of the products

    @classmethod
    def of(cls, like: Tensor, gram_dtype: torch.dtype | None) -> _Plan:
        dtype = gram_dtype or gram_product_dtype(like)
        check_gram_dtype(dtype)
        missing = like.shape[2] - like.shape[1]
        return cls(missing, missing <= 0, dtype)

    def parts(self, batch: Tensor) -> Sequence[Tensor]:
        """Return the matrices in the dtype of products: as they are, or some copied at a time."""
        if batch.dtype == self.dtype:
            return [batch]
        size = max(1, _ENTRIES // math.prod(batch.shape[1:]))
        return [part.to(self.dtype) for part in batch.split(size)]


def _grams(plan: _Plan, batches: Sequence[Tensor]) -> Tensor:
    """Return the Gram matrices minus identity of all matrices, (matrices, k, k)."""
    with torch.autocast(batches[0].device.type, enabled=False):
        parts = [part for batch in batches for part in plan.parts(batch)]
        factors = [(p.mT, p) if plan.by_columns else (p, p.mT) for p in parts]
        return gram_minus_identity(factors, compute_dtype(batches[0]))


def _slopes(plan: _Plan, batch: Tensor, scaled: Tensor) -> Tensor:
    """Return ``W G`` or ``G W`` for each matrix, in its dtype."""
    is_transposed = batch.stride(1) == 1 < batch.stride(2)
    slopes: list[Tensor] = []
    start = 0
    for part in plan.parts(batch):
        gram = scaled[start : start + len(part)]
        # As stored, so that the gradient lies as the parameter does.
        stored = part.mT if is_transposed else part
        pair = (stored, gram) if plan.by_columns != is_transposed else (gram, stored)
        slope = torch.bmm(*pair)
        slopes.append((slope.mT if is_transposed else slope).to(batch.dtype))
        start += len(part)
    return slopes[0] if len(slopes) == 1 else torch.cat(slopes)


class _BatchedGram(torch.autograd.Function):
    """|G|_F^2 of each matrix, G its Gram matrix minus identity; gradient ``4 W G`` or ``4 G W``."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *batches: Tensor) -> Tensor:
        ctx.plan = plan
        gram = _grams(plan, batches)
        ctx.save_for_backward(gram, *batches)
        return sums_of_squares(gram)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gram, *batches = ctx.saved_tensors
        plan: _Plan = ctx.plan
        if torch.is_grad_enabled():
            return None, *with_graph(partial(_plain, plan), batches, grad)
        with torch.autocast(gram.device.type, enabled=False):
            scaled = (gram * (4 * grad)[:, None, None]).to(plan.dtype)
            shares = scaled.split([len(batch) for batch in batches])
            return None, *map(partial(_slopes, plan), batches, shares)


def _plain(plan: _Plan, *batches: Tensor) -> Tensor:
    """Return the values of `_BatchedGram`, in operations that autograd supports."""
    dtype = torch.promote_types(plan.dtype, torch.float32)
    return sums_of_squares(_grams(replace(plan, dtype=dtype), batches))
