"""Attention masks: which key each query may see, made once per forward pass and only when a mask is
needed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wellposed.errors import ShapeError
from wellposed.functional import check_padding_shape
from wellposed.linalg import MaskKind


class AttentionMask(NamedTuple):
    """A finished mask: `mask` is bool (batch | 1, 1, queries, keys), True = may attend, or None
    when all may.

    `is_causal` is the flag for `scaled_dot_product_attention`; it is True only when `mask` is None.
    A stack makes one `AttentionMask` and hands it to every layer in place of the
    `key_padding_mask`, so that layers do not rebuild it.

    `kind` is what is known of the pattern, for Lipschitz bounds: `"full"` (real tokens see each
    other, padding sees itself), `"causal"` (the same, earlier tokens only), or `"any"` (nothing but
    that each token may see itself), which is right for every mask and is what a mask made by hand
    has.
    """

    mask: Tensor | None
    is_causal: bool
    kind: MaskKind = "any"

    @property
    def flags(self) -> dict[str, Any]:
        """What `scaled_dot_product_attention` takes of it."""
        return {"attn_mask": self.mask, "is_causal": self.is_causal}


PaddingMask = Tensor | AttentionMask | None
"""What an attention module takes as `key_padding_mask`; pass it to `attention_mask` and use what
comes back."""


def attention_mask(
    key_padding_mask: PaddingMask,
    is_causal: bool,
    num_queries: int,
    num_keys: int,
    device: torch.device,
) -> AttentionMask:
    """Query i may see key j when both are real tokens and, if causal,
    `j <= i + num_keys - num_queries`; or `j` is `i`.

    Exact. The queries are the last `num_queries` of the `num_keys` positions (a cache holds the
    earlier ones). A padded query sees itself alone, so no row is empty and no softmax is 0/0.
    Without padding no mask is made unless several queries stand behind a cache.

    Args:
        key_padding_mask: bool (batch, keys), True = padding; or None; or an `AttentionMask`,
            returned as it is.
        is_causal: whether a query is kept from later keys.
        num_queries: tokens of this call.
        num_keys: tokens of this call and of the cache.
        device: where the mask is made.

    Returns:
        `mask` and `is_causal` for `scaled_dot_product_attention`; `mask` broadcasts to (batch,
        heads, queries, keys).

    Raises:
        ShapeError: the padding mask is not bool (batch, keys), or there are more queries than keys.

    Cost: at most three boolean passes over (batch, queries, keys); nothing without padding.

    >>> made = attention_mask(torch.tensor([[False, False, True]]), True, 3, 3, torch.device("cpu"))
    >>> made.mask[0, 0].int().tolist(), made.is_causal
    ([[1, 0, 0], [1, 1, 0], [0, 0, 1]], False)
    >>> attention_mask(None, True, 3, 3, torch.device("cpu"))
    AttentionMask(mask=None, is_causal=True, kind='causal')
    """
    if isinstance(key_padding_mask, AttentionMask):
        made = key_padding_mask.mask
        if made is not None and made.shape[-2:] != (num_queries, num_keys):
            raise ShapeError(
                f"attention: received a finished mask {tuple(made.shape)}; expected (batch or 1, 1,"
                f" {num_queries}, {num_keys}): queries and keys"
            )
        return key_padding_mask
    if num_queries > num_keys:
        raise ShapeError(
            f"attention: received {num_queries} queries and {num_keys} keys; expected the queries"
            " to be the last of the keys, so at most as many; pass a cache that returns the"
            " earlier keys and the new ones together"
        )
    kind: MaskKind = "causal" if is_causal else "full"
    if key_padding_mask is None:
        if not is_causal or num_queries == 1:
            return AttentionMask(None, False, kind)
        if num_queries == num_keys:
            return AttentionMask(None, True, kind)
        return AttentionMask(_causal(num_queries, num_keys, device)[None, None], False, kind)
    check_padding_shape("attention", key_padding_mask, (*key_padding_mask.shape[:1], num_keys))
    real = ~key_padding_mask.to(device)
    queries = real[:, num_keys - num_queries :]
    allowed = queries[:, None, :, None] & real[:, None, None, :]
    if is_causal and num_queries > 1:
        allowed = allowed & _causal(num_queries, num_keys, device)
    keys = torch.arange(num_keys, device=device)
    itself = keys[num_keys - num_queries :, None] == keys
    return AttentionMask(allowed | itself, False, kind)


def check_batch(key_padding_mask: PaddingMask, x: Tensor) -> None:
    """Raise `ShapeError` where a padding mask is of another number of sequences than x."""
    if isinstance(key_padding_mask, Tensor) and len(key_padding_mask) not in (1, len(x)):
        raise ShapeError(
            f"attention: key_padding_mask has shape {tuple(key_padding_mask.shape)} for x"
            f" {tuple(x.shape)}; expected ({len(x)}, keys)"
        )


def memory_mask(key_padding_mask: PaddingMask, memory: Tensor) -> AttentionMask:
    """Return the mask with which every query sees every real token of the memory.

    Args:
        key_padding_mask: bool (batch, memory tokens), True = padding; or None; or a finished mask,
            returned as it is.
        memory: (batch, memory tokens, width).

    Raises:
        ShapeError: the mask is not bool (batch, memory tokens).

    >>> memory_mask(torch.tensor([[False, True]]), torch.zeros(1, 2, 4)).mask.int().tolist()
    [[[[1, 0]]]]
    """
    if isinstance(key_padding_mask, AttentionMask):
        return key_padding_mask
    if key_padding_mask is None:
        return AttentionMask(None, False)
    check_padding_shape("cross-attention", key_padding_mask, tuple(memory.shape[:2]))
    return AttentionMask(~key_padding_mask[:, None, None, :], False)


def known_pattern(mask: PaddingMask, is_causal: bool) -> MaskKind:
    """What may be assumed of the mask in a bound: of a mask made by hand, only that it keeps the
    diagonal."""
    if not isinstance(mask, AttentionMask):
        return "causal" if is_causal else "full"
    if mask.mask is None and mask.kind == "any":
        return "causal" if is_causal or mask.is_causal else "full"
    return mask.kind


def most_visible(mask: PaddingMask, keys: int) -> Tensor | int:
    """The N of the bound, (batch,) or one number for all: most keys that a query sees or queries
    that see a key.

    The two are equal for padding with or without a causal mask; a hub that all see makes the second
    larger.
    """
    if isinstance(mask, Tensor):
        return (~mask).sum(-1).clamp_min(1)
    if mask is None or mask.mask is None:
        return keys
    return torch.maximum(*(mask.mask.sum(dim).flatten(1).amax(-1) for dim in (-1, -2)))


def _causal(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    every = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return every.tril(num_keys - num_queries)
