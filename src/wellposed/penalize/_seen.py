"""What one attention call lets us see of its affinities, and the penalty of it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.functional import affinity_penalty, affinity_penalty_from_logits


@dataclass(frozen=True)
class Estimate:
    """How the affinity penalty is to be computed."""

    estimator: str
    num_probes: int
    generator: torch.Generator | None


class Seen(Protocol):
    """One call of one attention module."""

    def penalty(self, how: Estimate) -> Tensor:
        """Return |A^T A - I|_F^2, shape (batch, heads)."""
        ...

    def carries_gradient(self) -> bool:
        """Tell whether the affinities are part of a graph."""
        ...


@dataclass(frozen=True)
class SeenQueryKey:
    """Query and key as `scaled_dot_product_attention` received them, before dropout."""

    query: Tensor
    key: Tensor
    attn_mask: Tensor | None
    is_causal: bool
    scale: float | None

    @classmethod
    def read(cls, query: Tensor, key: Tensor, value: Any, *rest: Any, **named: Any) -> SeenQueryKey | None:
        """Read the arguments of a call; None if the affinity is not square."""
        del value
        named = dict(zip(("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"), rest, strict=False)) | named
        if query.ndim != 4 or query.shape[-2] != key.shape[-2]:
            return None
        return cls(query, key, named.get("attn_mask"), bool(named.get("is_causal", False)), named.get("scale"))

    def penalty(self, how: Estimate) -> Tensor:
        return affinity_penalty(
            self.query,
            self.key,
            estimator=how.estimator,  # type: ignore[arg-type]
            num_probes=how.num_probes,
            attn_mask=self.attn_mask,
            is_causal=self.is_causal,
            scale=self.scale,
            generator=how.generator,
        )

    def carries_gradient(self) -> bool:
        return self.query.requires_grad or self.key.requires_grad


@dataclass(frozen=True)
class SeenLogits:
    """N x N logits on their way into a softmax: attention written out by hand, or eager implementations."""

    logits: Tensor
    num_heads: int

    @classmethod
    def read(cls, num_heads: int, logits: Tensor, dim: int | None = None, *_: Any, **named: Any) -> SeenLogits | None:
        """Read the arguments of a softmax; None if it is not over the last side of square matrices."""
        dim = named.get("dim", dim)
        square = logits.ndim in (3, 4) and logits.shape[-1] == logits.shape[-2]
        if not square or dim not in (-1, logits.ndim - 1):
            return None
        return cls(logits, num_heads)

    def penalty(self, how: Estimate) -> Tensor:
        del how  # the logits are there already, so probes would save nothing
        tokens = self.logits.shape[-1]
        return affinity_penalty_from_logits(self.logits.reshape(-1, self.num_heads, tokens, tokens))

    def carries_gradient(self) -> bool:
        return self.logits.requires_grad


@dataclass(frozen=True)
class SeenMultihead:
    """The input of a `torch.nn.MultiheadAttention`; query and key are projected again when the penalty is computed.

    Nothing is computed during the model's own forward pass, so gradient checkpointing sees the same graph twice.
    """

    module: nn.MultiheadAttention
    inputs: Tensor
    key_padding_mask: Tensor | None
    attn_mask: Tensor | None
    autocast_dtype: torch.dtype | None

    @classmethod
    def read(
        cls, module: nn.MultiheadAttention, query: Tensor, key: Tensor, *_: Any, **named: Any
    ) -> SeenMultihead | None:
        """Read the arguments of `multi_head_attention_forward`; None unless query and key are one tensor."""
        if query is not key or module.bias_k is not None or module.add_zero_attn:
            return None
        kind = query.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return cls(module, query, named.get("key_padding_mask"), named.get("attn_mask"), dtype)

    def penalty(self, how: Estimate) -> Tensor:
        heads = self.module.num_heads
        inputs = self.inputs if self.inputs.ndim == 3 else self.inputs[:, None]
        tokens, batch, _ = inputs.shape
        query, key = (item.view(tokens, batch, heads, -1).permute(1, 2, 0, 3) for item in self._projected(inputs))
        return affinity_penalty(
            query,
            key,
            estimator=how.estimator,  # type: ignore[arg-type]
            num_probes=how.num_probes,
            attn_mask=self._mask(batch, heads, tokens),
            key_padding_mask=self._padding(),
            generator=how.generator,
        )

    def carries_gradient(self) -> bool:
        return self.inputs.requires_grad or self._weights()[0].requires_grad

    def _projected(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        context = (
            nullcontext()
            if self.autocast_dtype is None
            else torch.autocast(inputs.device.type, dtype=self.autocast_dtype)
        )
        bias = self.module.in_proj_bias
        biases = (None, None) if bias is None else bias.chunk(3)[:2]
        with context:
            query, key = (F.linear(inputs, w, b) for w, b in zip(self._weights(), biases, strict=True))
        return query, key

    def _weights(self) -> tuple[Tensor, Tensor]:
        if self.module.in_proj_weight is None:
            return self.module.q_proj_weight, self.module.k_proj_weight  # type: ignore[return-value]
        query, key, _ = self.module.in_proj_weight.chunk(3)
        return query, key

    def _padding(self) -> Tensor | None:
        mask = self.key_padding_mask
        if mask is None:
            return None
        flags = mask if mask.dtype == torch.bool else mask < torch.finfo(mask.dtype).min / 2
        return flags if flags.ndim == 2 else flags[None]

    def _mask(self, batch: int, heads: int, tokens: int) -> Tensor | None:
        mask = self.attn_mask
        if mask is None:
            return None
        if mask.dtype == torch.bool:
            mask = ~mask  # here True means "may attend", there it means "may not"
        return mask if mask.ndim == 2 else mask.view(batch, heads, tokens, tokens)
