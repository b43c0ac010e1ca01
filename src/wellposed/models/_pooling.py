"""From token vectors to one vector per sequence; padding never counts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wellposed.registry import Registry

POOLINGS = Registry[Callable[[Tensor, Tensor | None], Tensor]]("pooling")
"""`pool(hidden, key_padding_mask) -> Tensor`: (batch, tokens, width) to (batch, width); True in the
mask = padding."""


@POOLINGS.register("mean")
def mean_pool(hidden: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Return `1/n sum_i x_i` over the n real tokens; 0 for a row without any.

    >>> mean_pool(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[False, False, True]]))
    tensor([[2.]])
    """
    if key_padding_mask is None:
        return hidden.mean(dim=1)
    count = (~key_padding_mask).sum(dim=1, keepdim=True).clamp(min=1)
    return hidden.masked_fill(key_padding_mask[..., None], 0.0).sum(dim=1) / count


@POOLINGS.register("first")
def first_pool(hidden: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Return the vector of the first real token; 0 for a row without any.

    >>> first_pool(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[True, False, False]]))
    tensor([[3.]])
    """
    if key_padding_mask is None:
        return hidden[:, 0]
    index = (~key_padding_mask).int().argmax(dim=1)
    first = hidden[torch.arange(hidden.shape[0], device=hidden.device), index]
    return first.masked_fill(key_padding_mask.all(dim=1, keepdim=True), 0.0)


@POOLINGS.register("max")
def max_pool(hidden: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Return the largest value of each coordinate over the real tokens; 0 for a row without any.

    >>> max_pool(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[False, False, True]]))
    tensor([[3.]])
    """
    if key_padding_mask is None:
        return hidden.amax(dim=1)
    largest = hidden.masked_fill(key_padding_mask[..., None], float("-inf")).amax(dim=1)
    return largest.masked_fill(key_padding_mask.all(dim=1, keepdim=True), 0.0)
