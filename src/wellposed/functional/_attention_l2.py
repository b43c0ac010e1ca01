"""L2 attention as one fused dot-product attention: the distance is a dot product of slightly wider
vectors."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.errors import ConfigError
from wellposed.functional.as_dot_product import check_attention_inputs, common_shift, l2_vectors


def l2_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    r"""Row i is `sum_j p_ij v_j` with `p_ij = softmax_j(-scale |q_i - k_j|^2)`.

    Exact up to rounding, linear in memory: never an N x N tensor. Kim, Papamakarios, Mnih (2021),
    eq. 13 and sec. 3.2. In the softmax `|q_i|^2` cancels, so the logits are
    `2 scale [q_i, 1] . [k_j, -|k_j|^2 / 2]`: one call of `scaled_dot_product_attention` on vectors
    a few columns wider, whose fused kernel does the rest.

    Accuracy: logits err by a few rounding errors *of float32* relative to
    `scale (|q_i| |k_j| + |k_j|^2)`, in half precision too, where the norm is split over three
    columns. Distances do not change when queries and keys move
    together, so both are first moved near the origin: by the mean real key; by the first real key
    where a causal or a general mask could carry rounding of a later token into an earlier row; in
    half precision only in those coordinates where the subtraction is exact. The shift is a constant
    for autograd, so gradients are strictly causal.

    Args:
        query: (..., queries, head_dim), any floating dtype. The leading dimensions broadcast.
        key: (..., keys, head_dim).
        value: (..., keys, value_dim); when it is `key` itself, the augmented keys serve as values
            without a copy.
        attn_mask: broadcasts to (..., queries, keys); bool, True = may attend, or float, added to
            the logits. A row without any key returns zero.
        is_causal: query i sees keys j <= i.
        dropout_p: probability of dropping an attention weight. No certificate covers it.
        scale: positive; `1 / sqrt(head_dim)` where not given.
        key_padding_mask: bool (batch, keys), True = padding, batch the first leading dimension
            ((keys,) where query has none). It costs nothing: padding is one more term of the norm
            column and no mask tensor is made, so it combines with `is_causal`. A row all of whose
            keys are padding averages over padding.

    Returns:
        (..., queries, value_dim) in the dtype of `query`, or the autocast dtype under autocast.

    Raises:
        ShapeError: the shapes or the padding mask do not fit.
        ConfigError: `scale` is not positive, or `attn_mask` is combined with `is_causal`.

    Cost: `scaled_dot_product_attention` at head width d + 8 (d a multiple of 8) plus copies linear
    in N. On CPU in float32 at d = 64 the wider kernel alone takes 1.13 to 1.16 times the narrow
    one, so that is the floor; measured with the copies 1.08 to 1.22 (1.22 to 1.29 under a causal
    mask, which halves the kernel and not the copies). Second derivatives and forward mode need
    `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`, as for that function. float16 keys must have
    norm below 5790. Lipschitz only in the tied form of `wellposed.nn.L2SelfAttention`.

    >>> q = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    >>> l2_attention(q, q, q, scale=1.0).round(decimals=4)
    tensor([[0., 0.],
            [3., 4.]])
    """
    check_attention_inputs("l2_attention", (query, key, value), attn_mask, key_padding_mask)
    if scale is not None and not scale > 0:
        raise ConfigError(
            f"l2_attention: scale is {scale}; expected a positive number (default 1 /"
            " sqrt(head_dim))"
        )
    if attn_mask is not None and is_causal:
        raise ConfigError(
            "l2_attention: received attn_mask and is_causal=True; expected one of them; put the"
            " causal mask into attn_mask, or pass padding as key_padding_mask"
        )
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    tied = value is key
    padding = key_padding_mask
    if padding is not None and lead:
        # (batch, 1, .., keys)
        padding = padding.reshape(padding.shape[0], *(1,) * (len(lead) - 1), padding.shape[-1])
    query, key = query.expand(*lead, -1, -1), key.expand(*lead, -1, -1)
    value = key if tied else value.expand(*lead, -1, -1)

    shift = common_shift(query, key, padding, first=is_causal or attn_mask is not None)
    # Rows of the weights sum to one only where no row can be empty and nothing is dropped; then P(k
    # - m) + m = P k.
    shares_keys = tied and attn_mask is None and dropout_p == 0
    value_dim = value.shape[-1]
    wide_query, wide_key = l2_vectors(query, key, shift, padding=padding, value_dim=value_dim)
    dtype = wide_key.dtype
    missing = (0, wide_key.shape[-1] - value_dim)
    wide_value = wide_key if shares_keys else F.pad(value.to(dtype), missing)
    joined = F.scaled_dot_product_attention(
        *(_four_dimensional(part, lead) for part in (wide_query, wide_key, wide_value)),
        attn_mask=_align_mask(attn_mask, lead),
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=2 * scale,
    )
    joined = joined[..., :value_dim].reshape(*lead, query.shape[-2], value_dim)
    return joined + shift.to(dtype) if shares_keys else joined


def _four_dimensional(tokens: Tensor, lead: torch.Size) -> Tensor:
    """Reshape (*lead, tokens, width) to (batch, heads, tokens, width), which the fused kernels ask
    for."""
    if len(lead) == 2:
        return tokens
    return tokens.reshape(lead.numel(), 1, *tokens.shape[-2:])


def _align_mask(mask: Tensor | None, lead: torch.Size) -> Tensor | None:
    if mask is None or mask.dim() <= 2 or len(lead) == 2:
        return mask
    return mask.expand(*lead, *mask.shape[-2:]).reshape(lead.numel(), 1, *mask.shape[-2:])
