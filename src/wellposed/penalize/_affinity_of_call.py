"""The penalty of the affinities of one attention call."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.functional import affinity_penalty, affinity_penalty_from_logits
from wellposed.watch import AttentionCall, MultiheadCall, ScaledDotProductCall, SoftmaxCall


@dataclass(frozen=True)
class Estimate:
    """How the affinity penalty is to be computed."""

    estimator: Literal["exact", "probes"]
    num_probes: int
    generator: torch.Generator | None

    def penalty(self, call: AttentionCall) -> Tensor:
        """Return |A^T A - I|_F^2 of a call, shape (batch, heads)."""
        if isinstance(
            call, SoftmaxCall
        ):  # the logits are there already, so probes would save nothing
            return affinity_penalty_from_logits(call.logits)
        if isinstance(call, ScaledDotProductCall):
            return self._of(
                call.query,
                call.key,
                attn_mask=call.attn_mask,
                is_causal=call.is_causal,
                scale=call.scale,
            )
        assert isinstance(call, MultiheadCall)
        inputs, heads = _inputs(call), _module(call).num_heads
        tokens, batch, _ = inputs.shape
        query, key = (
            item.view(tokens, batch, heads, -1).permute(1, 2, 0, 3)
            for item in _projected(call, inputs)
        )
        return self._of(
            query, key, attn_mask=_mask(call, batch, heads, tokens), key_padding_mask=_padding(call)
        )

    def _of(self, query: Tensor, key: Tensor, **masks: Any) -> Tensor:
        return affinity_penalty(
            query,
            key,
            estimator=self.estimator,
            num_probes=self.num_probes,
            generator=self.generator,
            **masks,
        )


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


def carries_gradient(call: AttentionCall) -> bool:
    """Tell whether the affinities are part of a graph."""
    if isinstance(call, SoftmaxCall):
        return call.logits.requires_grad
    if isinstance(call, ScaledDotProductCall):
        return call.query.requires_grad or call.key.requires_grad
    assert isinstance(call, MultiheadCall)
    return call.arguments[0].requires_grad or _query_and_key_weights(call)[0].requires_grad


def _module(call: MultiheadCall) -> nn.MultiheadAttention:
    assert isinstance(call.module, nn.MultiheadAttention)
    return call.module


def _inputs(call: MultiheadCall) -> Tensor:
    inputs = call.arguments[0]
    return inputs if inputs.ndim == 3 else inputs[:, None]


def _projected(call: MultiheadCall, inputs: Tensor) -> list[Tensor]:
    dtype = call.autocast_dtype
    context = nullcontext() if dtype is None else torch.autocast(inputs.device.type, dtype=dtype)
    bias = _module(call).in_proj_bias
    biases = (None, None) if bias is None else bias.chunk(3)[:2]
    with context:
        return [
            F.linear(inputs, w, b)
            for w, b in zip(_query_and_key_weights(call), biases, strict=True)
        ]


def _query_and_key_weights(call: MultiheadCall) -> tuple[Tensor, Tensor]:
    module = _module(call)
    if module.in_proj_weight is None:
        return module.q_proj_weight, module.k_proj_weight  # type: ignore[return-value]
    query, key, _ = module.in_proj_weight.chunk(3)
    return query, key


def _padding(call: MultiheadCall) -> Tensor | None:
    mask = call.named.get("key_padding_mask")
    if mask is None:
        return None
    flags = mask if mask.dtype == torch.bool else mask < torch.finfo(mask.dtype).min / 2
    return flags if flags.ndim == 2 else flags[None]


def _mask(call: MultiheadCall, batch: int, heads: int, tokens: int) -> Tensor | None:
    mask = call.named.get("attn_mask")
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = ~mask  # here True means "may attend", there it means "may not"
    return mask if mask.ndim == 2 else mask.view(batch, heads, tokens, tokens)
