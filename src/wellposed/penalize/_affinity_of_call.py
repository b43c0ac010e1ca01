"""The penalty of the affinities of one attention call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.functional import affinity_penalty_from_logits
from wellposed.watch import AttentionCall, MultiheadCall, ScaledDotProductCall, SoftmaxCall


def penalty_of_call(call: AttentionCall, estimate: Callable[..., Tensor]) -> Tensor:
    """Return |A^T A - I|_F^2 of a call, shape (batch, heads), by ``estimate`` of query and key."""
    if isinstance(call, SoftmaxCall):
        # The logits are there already, so probes would save nothing.
        return affinity_penalty_from_logits(call.logits)
    if isinstance(call, ScaledDotProductCall):
        masks = {"attn_mask": call.attn_mask, "is_causal": call.is_causal, "scale": call.scale}
        return estimate(call.query, call.key, **masks)
    assert isinstance(call, MultiheadCall)
    module = call.module
    assert isinstance(module, nn.MultiheadAttention)
    inputs = call.arguments[0] if call.arguments[0].ndim == 3 else call.arguments[0][:, None]
    tokens, batch, _ = inputs.shape
    query, key = (
        item.view(tokens, batch, module.num_heads, -1).permute(1, 2, 0, 3)
        for item in _projected(module, inputs, call.autocast_dtype)
    )
    mask = call.named.get("attn_mask")
    if mask is not None:
        # Here True means "may attend", there it means "may not".
        mask = ~mask if mask.dtype == torch.bool else mask
        mask = mask if mask.ndim == 2 else mask.view(batch, module.num_heads, tokens, tokens)
    padding = call.named.get("key_padding_mask")
    if padding is not None and padding.dtype != torch.bool:
        padding = padding < torch.finfo(padding.dtype).min / 2
    return estimate(query, key, attn_mask=mask, key_padding_mask=padding)


def can_be_penalised(call: AttentionCall) -> bool:
    """Tell whether query and key of a call that attends to itself can be read."""
    if not isinstance(call, MultiheadCall):
        return True
    module = call.module
    return (
        isinstance(module, nn.MultiheadAttention)
        and module.bias_k is None
        and not module.add_zero_attn
    )


def _projected(
    module: nn.MultiheadAttention, inputs: Tensor, dtype: torch.dtype | None
) -> list[Tensor]:
    if module.in_proj_weight is None:
        weights = (module.q_proj_weight, module.k_proj_weight)
    else:
        weights = module.in_proj_weight.chunk(3)[:2]
    bias = module.in_proj_bias
    biases = (None, None) if bias is None else bias.chunk(3)[:2]
    context = nullcontext() if dtype is None else torch.autocast(inputs.device.type, dtype=dtype)
    with context:
        return [F.linear(inputs, w, b) for w, b in zip(weights, biases, strict=True)]
