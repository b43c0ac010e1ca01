"""How far matrices are from orthogonal that one tensor holds, as the experts of a layer do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wellposed.functional._penalties import (
    Side,
    check_gram_dtype,
    gram_minus_identity,
    gram_product_dtype,
    root,
    squared_distances,
)
from wellposed.linalg import compute_dtype, in_stacks

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
        some = [batches[index] for index in places]
        plan = _Plan.for_stack(some[0], gram_dtype)
        values = squared_distances(plan, some)
        values = values + plan.missing * ((side == "columns") - plan.by_columns)
        results.append((places, values if squared else root(values)))
    return results


def _alike(batches: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the indices of tensors that are computed together."""

    def kind(index: int) -> tuple[Any, ...]:
        some = batches[index]
        return some.requires_grad, some.shape[1:], some.dtype, some.device

    def size(index: int) -> int:
        count, rows, columns = batches[index].shape
        return _ENTRIES // (count * min(rows, columns) ** 2)

    yield from in_stacks(range(len(batches)), kind, size)


@dataclass(frozen=True)
class _Plan:
    """How matrices of one shape are computed."""

    missing: int  # columns - rows
    by_columns: bool  # W^T W, not W W^T
    dtype: torch.dtype  # of the products
    groups: tuple[Any, ...] = ()

    @classmethod
    def for_stack(cls, like: Tensor, gram_dtype: torch.dtype | None) -> _Plan:
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

    def grams(self, tensors: Sequence[Tensor]) -> Tensor:
        with torch.autocast(tensors[0].device.type, enabled=False):
            parts = [part for batch in tensors for part in self.parts(batch)]
            factors = [(p.mT, p) if self.by_columns else (p, p.mT) for p in parts]
            return gram_minus_identity(factors, compute_dtype(tensors[0]))

    def slopes(self, tensors: Sequence[Tensor], scaled: Tensor) -> Iterable[Tensor]:
        shares = scaled.to(self.dtype).split([len(batch) for batch in tensors])
        return map(self._slope, tensors, shares)

    def widened(self) -> _Plan:
        return replace(self, dtype=torch.promote_types(self.dtype, torch.float32))

    def _slope(self, batch: Tensor, scaled: Tensor) -> Tensor:
        """Return ``W G`` or ``G W`` for each matrix of a tensor, in its dtype."""
        # As stored, so that the gradient lies as the parameter does.
        is_transposed = batch.stride(1) == 1 < batch.stride(2)
        is_left = self.by_columns == is_transposed
        slopes: list[Tensor] = []
        start = 0
        for part in self.parts(batch):
            gram = scaled[start : start + len(part)]
            stored = part.mT if is_transposed else part
            slope = torch.bmm(gram, stored) if is_left else torch.bmm(stored, gram)
            slopes.append((slope.mT if is_transposed else slope).to(batch.dtype))
            start += len(part)
        return slopes[0] if len(slopes) == 1 else torch.cat(slopes)
