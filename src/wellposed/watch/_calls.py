"""The three calls by which models attend, and the attention weights that follow from each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.roles import AttentionRole


class AttentionCall(Protocol):
    """One call of attention: (batch, heads, queries, keys) weights, one row for each query."""

    @property
    def attends_to_itself(self) -> bool:
        """Whether there are as many keys as queries, as where a sequence attends to its own
        tokens."""
        ...

    def weights(self) -> Tensor:
        """Return the weights without dropout, in float32 at least; rows without a key are NaN."""
        ...


@dataclass(frozen=True)
class ScaledDotProductCall:
    """Query and key (batch, heads, tokens, width) as `scaled_dot_product_attention` received
    them."""

    query: Tensor
    key: Tensor
    attn_mask: Tensor | None
    is_causal: bool
    scale: float | None

    @classmethod
    def read(
        cls, role: AttentionRole, query: Tensor, key: Tensor, value: Any, *rest: Any, **named: Any
    ) -> ScaledDotProductCall | None:
        """Read the arguments of a call; None where they cannot be divided into the heads of
        ``role``."""
        del value
        named = (
            dict(
                zip(
                    ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
                    rest,
                    strict=False,
                )
            )
            | named
        )
        mask = named.get("attn_mask")
        if query.ndim != 4:
            if any(math.prod(item.shape[:-2]) % role.num_heads for item in (query, key)):
                return None
            if mask is not None:
                mask = _by_head(mask.expand(*query.shape[:-2], *mask.shape[-2:]), role.num_heads)
            query, key = (_by_head(item, role.num_heads) for item in (query, key))
        return cls(query, key, mask, bool(named.get("is_causal", False)), named.get("scale"))

    @property
    def attends_to_itself(self) -> bool:
        return self.query.shape[-2] == self.key.shape[-2]

    def weights(self) -> Tensor:
        query, key = (
            t.detach().to(torch.promote_types(t.dtype, torch.float32))
            for t in (self.query, self.key)
        )
        if key.shape[-3] != query.shape[-3]:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        logits = (
            query @ key.mT * (1 / math.sqrt(query.shape[-1]) if self.scale is None else self.scale)
        )
        if self.is_causal:
            ahead = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
            logits = logits.masked_fill(ahead, -math.inf)
        if self.attn_mask is not None:
            mask = self.attn_mask
            logits = (
                logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
            )
        return logits.softmax(-1)


@dataclass(frozen=True)
class SoftmaxCall:
    """Logits (batch, heads, queries, keys) on their way into a softmax: attention written out by
    hand, or eager."""

    logits: Tensor

    @classmethod
    def read(
        cls, role: AttentionRole, logits: Tensor, dim: int | None = None, *_: Any, **named: Any
    ) -> SoftmaxCall | None:
        """Read the arguments of a softmax; None where it cannot be one over keys."""
        if logits.ndim not in (3, 4) or named.get("dim", dim) not in (-1, logits.ndim - 1):
            return None
        square = logits.shape[-1] == logits.shape[-2]
        divisible = math.prod(logits.shape[:-2]) % role.num_heads == 0
        if not divisible or (logits.ndim == 3 and role.kind == "self" and not square):
            return None
        return cls(_by_head(logits, role.num_heads))

    @property
    def attends_to_itself(self) -> bool:
        return self.logits.shape[-1] == self.logits.shape[-2]

    def weights(self) -> Tensor:
        logits = self.logits.detach()
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)


@dataclass(frozen=True)
class MultiheadCall:
    """The arguments of `multi_head_attention_forward`.

    Nothing is computed during the model's own forward pass, so gradient checkpointing sees the same
    graph twice.
    """

    module: nn.Module
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    autocast_dtype: torch.dtype | None

    @classmethod
    def read(cls, module: nn.Module, *arguments: Any, **named: Any) -> MultiheadCall:
        """Read the arguments of a call that ``module`` makes."""
        kind = arguments[0].device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return cls(module, arguments, named, dtype)

    @property
    def attends_to_itself(self) -> bool:
        return self.arguments[0] is self.arguments[1]

    def weights(self) -> Tensor:
        named = {
            **self.named,
            "training": False,
            "need_weights": True,
            "average_attn_weights": False,
        }
        with torch.no_grad():
            weights = F.multi_head_attention_forward(*self.arguments, **named)[1]
        assert weights is not None
        weights = weights if weights.ndim == 4 else weights[None]
        return weights.to(torch.promote_types(weights.dtype, torch.float32))


def _by_head(matrices: Tensor, num_heads: int) -> Tensor:
    """Return (..., rows, columns) as (batch, heads, rows, columns)."""
    return matrices.reshape(-1, num_heads, *matrices.shape[-2:])
