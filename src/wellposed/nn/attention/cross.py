"""Attention from one sequence to another, a memory whose keys and values are made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from wellposed.errors import NotLipschitzError, ShapeError
from wellposed.nn._registry import LayerBuilder
from wellposed.nn.attention.cosine import CosineCrossAttention
from wellposed.nn.attention.dot_product import SoftmaxHeads
from wellposed.nn.attention.l2_refusal import l2_attention_refusal
from wellposed.nn.attention.masks import AttentionMask, PaddingMask
from wellposed.registry import Registry

CROSS_ATTENTIONS = Registry[LayerBuilder]("cross-attention")
"""Attentions to a memory: `forward(x, memory, *, key_padding_mask=None, cache=None) -> Tensor`.

`x` is (batch, tokens, width), `memory` (batch, memory tokens, width), `key_padding_mask` what `memory_mask` takes.
Read from the configuration: as `ATTENTIONS`.
"""

KeysAndValues = tuple[Tensor, Tensor]


class MemoryCache(Protocol):
    """Keys and values of a memory, (batch, heads, memory tokens, head_dim) each, for one layer."""

    def once(self, project: Callable[[], KeysAndValues]) -> KeysAndValues:
        """Return what is stored; the first time, call `project` and store what it returns."""
        ...


def memory_mask(key_padding_mask: PaddingMask, memory: Tensor) -> AttentionMask:
    """Return the mask with which every query sees every real token of the memory.

    Args:
        key_padding_mask: bool (batch, memory tokens), True = padding; or None; or a finished mask, returned as it is.
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
    if key_padding_mask.dtype is not torch.bool or key_padding_mask.shape != memory.shape[:2]:
        raise ShapeError(
            f"cross-attention: key_padding_mask is {key_padding_mask.dtype} {tuple(key_padding_mask.shape)}; expected "
            f"torch.bool {tuple(memory.shape[:2])}, True = padding; from a Hugging Face attention_mask (1 = real "
            "token) pass attention_mask == 0"
        )
    return AttentionMask(~key_padding_mask[:, None, None, :], False)


class CrossAttention(SoftmaxHeads):
    """Per head, `softmax(q k^T / sqrt(d)) v` with `q = x W_q`, and `k = y W_k`, `v = y W_v` of a memory y.

    Exact up to rounding. Vaswani et al. (2017), sec. 3.2.3, computed by `scaled_dot_product_attention`. ``qk_norm`` as
    in `DotProductAttention`.

    Args:
        embed_dim: width D of a token of `x`.
        num_heads: number of heads; divides D. Each head has dimension d = D / num_heads.
        memory_dim: width of a token of the memory; D where not given.
        qk_norm: normalise queries and keys per head.
        dropout: probability of dropping an attention weight in training, in [0, 1).
        bias: whether the four projections have a bias.
        eps: epsilon of the query and key norms.

    Raises:
        ShapeError: `num_heads` does not divide `embed_dim`.

    Cost: 2 (N + M) D^2 + 2 N M D multiply-adds for N tokens and M of the memory; the part in M D^2 once with a cache.
    Not Lipschitz on an unbounded domain: use `CosineCrossAttention` where a certificate is wanted.

    >>> attention = CrossAttention(8, 2)
    >>> attention(torch.randn(3, 5, 8), torch.randn(3, 9, 8)).shape
    torch.Size([3, 5, 8])
    """

    def forward(
        self, x: Tensor, memory: Tensor, *, key_padding_mask: PaddingMask = None, cache: MemoryCache | None = None
    ) -> Tensor:
        """Attend from every token of `x` to the real tokens of the memory.

        Args:
            x: (batch, tokens, embed_dim).
            memory: (batch, memory tokens, memory_dim).
            key_padding_mask: bool (batch, memory tokens), True = padding; or a finished mask. A memory that is all
                padding gives the bias of `W_o` alone.
            cache: keys and values of this memory, made at the first call.

        Returns:
            (batch, tokens, embed_dim).

        Raises:
            ShapeError: the padding mask does not fit.
        """
        query = self._query(x)
        key, value = self._key_value(memory) if cache is None else cache.once(lambda: self._key_value(memory))
        return self._join(self._weighted(query, key, value, memory_mask(key_padding_mask, memory).mask))


class CosineMemoryAttention(CosineCrossAttention):
    """`CosineCrossAttention` that makes the keys and values of its memory once.

    >>> attention = CosineMemoryAttention(8, 2)
    >>> attention(torch.randn(3, 5, 8), torch.randn(3, 9, 8)).shape
    torch.Size([3, 5, 8])
    """

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Tensor, memory: Tensor, *, key_padding_mask: PaddingMask = None, cache: MemoryCache | None = None
    ) -> Tensor:
        """Attend from every token of `x` to the memory; arguments as `CrossAttention.forward`."""
        key, value = self._key_value(memory) if cache is None else cache.once(lambda: self._key_value(memory))
        return self._join(self._weighted(self._query(x), key, value, memory_mask(key_padding_mask, memory).mask))


def cross_attention_name(attention: str, given: str | None = None) -> str:
    """Return the registered cross-attention that stands beside a self-attention.

    ``given`` where there is one; else the self-attention's own name where a cross-attention has it; cosine beside the
    L2 attentions, which have no Lipschitz cross form; else dot_product.

    Raises:
        NotLipschitzError: ``given`` is an L2 attention.
        ConfigError: ``given`` is not registered.

    >>> cross_attention_name("dot_product"), cross_attention_name("l2_tied")
    ('dot_product', 'cosine')
    """
    if given is not None and given.startswith("l2"):
        raise NotLipschitzError(
            f"cross_attention: received {given!r}: L2 attention to another sequence has no Lipschitz constant: "
            f"{l2_attention_refusal(other_sequence_only=True)}; give cross_attention='cosine', or leave it out: with "
            "an L2 attention, self-attentions are L2 and cross-attentions cosine"
        )
    if given is not None:
        CROSS_ATTENTIONS.get(given)
        return given
    if attention in CROSS_ATTENTIONS:
        return attention
    return "cosine" if attention.startswith("l2") else "dot_product"


@CROSS_ATTENTIONS.register("dot_product")
def build_cross(config: Any, layer_index: int) -> CrossAttention:
    """Build the cross-attention of layer `layer_index` (every layer is alike)."""
    del layer_index
    return CrossAttention(
        config.hidden_size,
        config.num_attention_heads,
        qk_norm=config.qk_norm,
        dropout=config.attention_dropout,
        eps=config.layer_norm_eps,
    )


@CROSS_ATTENTIONS.register("cosine")
def build_cosine_cross(config: Any, layer_index: int) -> CosineMemoryAttention:
    """Build cosine cross-attention; read besides, where present: `cosine_eps` (0.01).

    ``qk_norm`` is for the self-attentions: queries and keys are normalised here anyway.
    """
    del layer_index
    return CosineMemoryAttention(
        config.hidden_size,
        config.num_attention_heads,
        eps=getattr(config, "cosine_eps", 0.01),
        dropout=config.attention_dropout,
    )
