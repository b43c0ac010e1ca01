"""Queries, keys and masks of one self-attention call, as the penalties on attention read them.

Shapes: B batch, H heads, N tokens, D head_dim; query and key (B, H, N, D).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.errors import ConfigError, ShapeError
from wellposed.functional._as_dot_product import broadcasts, check_padding_shape
from wellposed.functional._masks import unattended


@dataclass(frozen=True)
class Masks:
    """Scale and masks that turn Q K^T into logits, and which tokens are left out (None: none)."""

    scale: float
    allowed: Tensor | None  # bool, broadcastable to (B, H, N, N)
    bias: Tensor | None  # floating point, broadcastable to (B, H, N, N)
    padded: Tensor | None  # bool (B, 1, N) from key_padding_mask alone
    left_out: Tensor | None  # bool, broadcastable to (B, H, N)
    is_causal: bool
    top: Tensor | None = None  # largest logit of each row, if the bias is all of them

    def chunk(self, start: int, stop: int) -> Masks:
        """Return the masks of some sequences of the batch."""
        names = ("allowed", "bias", "padded", "left_out", "top")
        masks = {name: getattr(self, name) for name in names}
        batched = {name: m for name, m in masks.items() if m is not None and m.shape[0] != 1}
        return replace(self, **{name: mask[start:stop] for name, mask in batched.items()})

    def closed(self, query: Tensor) -> Tensor | None:
        """Return which keys a query may not attend to, from bool masks; None: any is allowed."""
        closed = None if self.allowed is None else ~self.allowed
        if self.padded is not None:
            padded = self.padded[..., None, :]
            closed = padded if closed is None else closed | padded
        if self.is_causal:
            closed = _later(query) if closed is None else closed | _later(query)
        return closed


class SelfAttention(NamedTuple):
    """Queries, keys of as many heads, and the masks of their logits."""

    query: Tensor
    key: Tensor
    masks: Masks


def self_attention_of(
    call: str,
    query: Tensor,
    key: Tensor,
    *,
    attn_mask: Tensor | None,
    is_causal: bool,
    key_padding_mask: Tensor | None,
    scale: float | None,
) -> SelfAttention:
    """Return the arguments of a penalty in four dimensions, with a key for each query head; raise
    for those of no self-attention, in the name of ``call``."""
    _check(call, query, key, attn_mask, key_padding_mask)
    query, key, attn_mask, key_padding_mask = _in_four_dimensions(
        query, key, attn_mask, key_padding_mask
    )
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return SelfAttention(query, key, _read_masks(scale, attn_mask, key_padding_mask, is_causal))


def closed_logits(query: Tensor, key: Tensor, masks: Masks) -> Tensor:
    """Return the masked logits, at least in float32; -inf for keys that a bool mask closes."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(dtype) * masks.scale) @ key.to(dtype).mT
    closed = masks.closed(query)
    scores = scores if masks.bias is None else scores + masks.bias
    return scores if closed is None else scores.masked_fill(closed, -torch.inf)


def _read_masks(
    scale: float, attn_mask: Tensor | None, padded: Tensor | None, is_causal: bool
) -> Masks:
    """Return the masks of an attention call in four dimensions."""
    flags = attn_mask is not None and attn_mask.dtype == torch.bool
    allowed = attn_mask if flags else None
    bias = None if flags else attn_mask
    if padded is not None and padded.is_floating_point():
        by_key = padded[..., None, :]
        bias = by_key if bias is None else bias + by_key
        padded = None

    if bias is not None:
        left_out = _unattended_in(bias, allowed, is_causal=is_causal)
    elif allowed is not None:
        visible = allowed & ~_later(allowed) if is_causal else allowed
        left_out = ~visible.any(dim=-2)
    else:
        return Masks(scale, None, None, padded, padded, is_causal)
    left_out = left_out if padded is None else left_out | padded

    return Masks(scale, allowed, bias, padded, left_out, is_causal)


def _unattended_in(bias: Tensor, allowed: Tensor | None, *, is_causal: bool) -> Tensor:
    """Return `unattended` of the masks alone: attention may be as sharp, and is no mask."""
    mask_alone = bias.detach()
    if allowed is not None:
        mask_alone = mask_alone.masked_fill(~allowed, -torch.inf)
    if is_causal:
        mask_alone = mask_alone.expand(*mask_alone.shape[:-2], mask_alone.shape[-1], -1)
        mask_alone = mask_alone.masked_fill(_later(mask_alone), -torch.inf)
    return unattended(mask_alone, torch.promote_types(bias.dtype, torch.float32))


def _later(query: Tensor) -> Tensor:
    tokens = query.shape[-2]
    return torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)


def _check(
    call: str, query: Tensor, key: Tensor, attn_mask: Tensor | None, padding: Tensor | None
) -> None:
    """Raise for arguments of a call that are no self-attention."""
    shapes = f"query {tuple(query.shape)} and key {tuple(key.shape)}"
    if not 2 <= query.ndim <= 4 or query.ndim != key.ndim or query.shape[-2:] != key.shape[-2:]:
        raise ShapeError(
            f"{call}: {shapes} must both be (..., tokens, head_dim) with the same tokens"
            " and head_dim, in two to four dimensions; cross-attention has no square affinity"
        )
    if query.ndim > 2 and query.shape[-3] % key.shape[-3]:
        raise ShapeError(
            f"{call}: {key.shape[-3]} key heads do not divide {query.shape[-3]} query heads"
        )
    if query.dtype == torch.float16 and query.device.type == "cpu":
        raise ConfigError(f"{call}: float16 queries on a CPU; use bfloat16 or float32 there")

    *lead, tokens, _ = query.shape
    square = (*lead, tokens, tokens)
    expected = (lead[0] if lead else 1, tokens)
    if attn_mask is not None and not broadcasts(attn_mask.shape, square):
        raise ShapeError(
            f"{call}: attn_mask is {tuple(attn_mask.shape)}, expected to broadcast to {square}"
        )

    if padding is not None and padding.numel() == math.prod(expected):
        padding = padding.reshape(expected)
    is_added = padding is not None and padding.is_floating_point()
    if padding is not None and not (is_added and tuple(padding.shape) == expected):
        check_padding_shape(call, padding, expected)


def _in_four_dimensions(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return query, key and masks as (batch, heads, ...)."""
    if attn_mask is not None and attn_mask.ndim == query.ndim == 3:
        attn_mask = attn_mask[:, None]
    ones = (1,) * (4 - query.ndim)
    query, key = (x.reshape(*x.shape[:-2], *ones, *x.shape[-2:]) for x in (query, key))
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
        attn_mask = attn_mask.expand(*attn_mask.shape[:2], query.shape[-2], -1)
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask.reshape(-1, 1, query.shape[-2])
    return query, key, attn_mask, key_padding_mask
