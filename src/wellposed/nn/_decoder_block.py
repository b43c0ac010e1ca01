"""A block that reads another sequence: self-attention, cross-attention, feed-forward."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wellposed.nn._registry import CROSS_ATTENTIONS, NORMS, RESIDUALS, LayerCache, MemoryCache
from wellposed.nn.attention.cross import cross_attention_name
from wellposed.nn.attention.masks import PaddingMask
from wellposed.nn.block import Block


class DecoderBlock(Block):
    """`x -> P(x, A)`, then `x -> P(x, C(., y))`, then `x -> P(x, F)`: a `Block` that reads a memory
    y in between.

    Exact. Vaswani et al. (2017), sec. 3.1. Norm placement P and residual as in `Block`; each of the
    three branches has its own.

    Args:
        config: see `Block`; and, where present, `cross_attention`, a name in `CROSS_ATTENTIONS`.

    Raises:
        ConfigError: a name is not registered.
        NotLipschitzError: an L2 attention is asked for as cross-attention.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(
    ...     hidden_size=8, num_attention_heads=2, intermediate_size=16, activation="gelu", attention="dot_product",
    ...     feedforward="mlp", residual="plain", norm="pre", qk_norm=False, dropout=0.0, attention_dropout=0.0,
    ...     layer_norm_eps=1e-5,
    ... )
    >>> DecoderBlock(config)(torch.randn(3, 5, 8), torch.randn(3, 9, 8), is_causal=True).shape
    torch.Size([3, 5, 8])
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        name = cross_attention_name(config.attention, getattr(config, "cross_attention", None))
        self.cross_attention = CROSS_ATTENTIONS.get(name)(config)
        self.cross_attention_norm = NORMS.get(config.norm)(config)
        self.cross_attention_residual = RESIDUALS.get(config.residual)(config)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x: Tensor,
        memory: Tensor,
        *,
        key_padding_mask: PaddingMask = None,
        is_causal: bool = False,
        cache: LayerCache | None = None,
        memory_mask: PaddingMask = None,
        memory_cache: MemoryCache | None = None,
    ) -> Tensor:
        """Map (batch, tokens, width) and a memory (batch, memory tokens, width) to (batch, tokens,
        width).

        The first three keywords are those of every attention, the last two those of every
        cross-attention.
        """

        def read(hidden: Tensor) -> Tensor:
            found = self.cross_attention(
                hidden, memory, key_padding_mask=memory_mask, cache=memory_cache
            )
            return self.dropout(found)

        x = self.attend(x, key_padding_mask=key_padding_mask, is_causal=is_causal, cache=cache)
        x = self.cross_attention_norm.around(x, read, self.cross_attention_residual)
        return self.feed(x)
