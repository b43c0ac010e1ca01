"""Attention masks: which keys each query may see, made once per forward pass if one is needed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wellposed.errors import ShapeError
from wellposed.functional import check_padding_shape
from wellposed.linalg import MaskKind
from wellposed.nn._positions import Rotations


class AttentionMask(NamedTuple):
    """A finished mask: bool (batch | 1, 1, queries, keys), True = may attend; None if all may.

    `is_causal` is the flag for `scaled_dot_product_attention`, True only if `mask` is None. A stack
    makes one mask and passes it to every layer as `key_padding_mask`.

    The `kind` is the known pattern, for Lipschitz bounds: `"full"` (real tokens see each other,
    padding sees itself), `"causal"` (the same, earlier tokens only), or `"any"`. The last assumes
    only that each token may see itself, so it is valid for masks made by hand.
    """

    mask: Tensor | None
    is_causal: bool
    kind: MaskKind = "any"
    rotations: Rotations | None = None
    """Tables of sines that the layers of a stack share in one pass, if they rotate by position."""

    @property
    def flags(self) -> dict[str, Any]:
        """Keyword arguments for `scaled_dot_product_attention`."""
        return {"attn_mask": self.mask, "is_causal": self.is_causal}

    def shared_by_layers(self) -> AttentionMask:
        """Return the mask for all layers of one pass: they compute tables of sines once."""
        return self._replace(rotations=Rotations())


PaddingMask = Tensor | AttentionMask | None
"""Type of `key_padding_mask`; `attention_mask` turns it into an `AttentionMask`."""


def attention_mask(
    key_padding_mask: PaddingMask,
    is_causal: bool,
    num_queries: int,
    num_keys: int,
    device: torch.device,
) -> AttentionMask:
    """Query i may see key j if both are real and, if causal, `j <= i + num_keys - num_queries`.

    Exact. Each token may always see itself, so no row is empty. The queries are the last
    `num_queries` of the `num_keys` positions; a cache supplies the earlier ones. Without padding
    the mask is None, unless several queries follow a cache. Otherwise it broadcasts to (batch,
    heads, queries, keys).

    Args:
        key_padding_mask: Bool (batch, keys), True = padding; or None; or an `AttentionMask`,
            returned unchanged.
        is_causal: Hide later keys from a query.
        num_queries: Tokens of this call.
        num_keys: Tokens of this call and of the cache.
        device: Device of the mask.

    Raises:
        ShapeError: The padding mask is not bool (batch, keys), or there are more queries than keys.

    Cost: at most three boolean passes over (batch, queries, keys); nothing without padding.

    >>> made = attention_mask(torch.tensor([[False, False, True]]), True, 3, 3, torch.device("cpu"))
    >>> made.mask[0, 0].int().tolist(), made.is_causal
    ([[1, 0, 0], [1, 1, 0], [0, 0, 1]], False)
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
            f"attention: received {num_queries} queries and {num_keys} keys; expected at most"
            " as many queries as keys; pass a cache that returns the earlier keys and the new ones"
            " together"
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
    """Raise `ShapeError` if the padding mask and x have different numbers of sequences."""
    if isinstance(key_padding_mask, Tensor) and len(key_padding_mask) not in (1, len(x)):
        raise ShapeError(
            f"attention: key_padding_mask has shape {tuple(key_padding_mask.shape)} for x"
            f" {tuple(x.shape)}; expected ({len(x)}, keys)"
        )


def memory_mask(key_padding_mask: PaddingMask, memory: Tensor) -> AttentionMask:
    """Return the mask with which every query sees every real token of the memory.

    Args:
        key_padding_mask: Bool (batch, memory tokens), True = padding, else ShapeError; or None; or
            a finished mask, returned unchanged.
        memory: (batch, memory tokens, width).

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
    """Return the pattern that a bound may assume; masks made by hand only keep the diagonal."""
    if not isinstance(mask, AttentionMask):
        return "causal" if is_causal else "full"
    if mask.mask is None and mask.kind == "any":
        return "causal" if is_causal or mask.is_causal else "full"
    return mask.kind


def most_visible(mask: PaddingMask, keys: int) -> Tensor | int:
    """Return the N of the bound, (batch,) or one number for all.

    It is the largest number of keys that a query sees, or of queries that see a key.
    """
    if isinstance(mask, Tensor):
        return (~mask).sum(-1).clamp_min(1)
    if mask is None or mask.mask is None:
        return keys
    return torch.maximum(*(mask.mask.sum(dim).flatten(1).amax(-1) for dim in (-1, -2)))


def _causal(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    every = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return every.tril(num_keys - num_queries)
