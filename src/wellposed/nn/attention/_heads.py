"""The shared parts of multi-head attentions: splitting and joining heads, projections, inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from wellposed.errors import ShapeError
from wellposed.nn._checks import CheckedModule, check_tokens
from wellposed.nn._registry import LayerBuilder, LayerCache, MemoryCache
from wellposed.nn.attention import _masks as masks
from wellposed.options import Rate, Size


def head_width(where: str, embed_dim: int, num_heads: int) -> int:
    """Return ``d = D / H``; raise `ShapeError` if H is below 1 or does not divide D."""
    if num_heads < 1 or embed_dim % num_heads:
        raise ShapeError(
            f"{where}: received embed_dim={embed_dim} and num_heads={num_heads}; expected a number"
            " of heads that divides the width; change one of them"
        )
    return embed_dim // num_heads


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Cut (batch, tokens, columns) into (batch, heads, tokens, columns / heads), a view."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def join_heads(heads: Tensor) -> Tensor:
    """Invert `split_heads`: (batch, heads, tokens, d) becomes (batch, tokens, heads d)."""
    return heads.transpose(1, 2).flatten(2)


def builder(
    kind: Callable[..., nn.Module], options: Callable[[Any], dict[str, Any]]
) -> LayerBuilder:
    """Return a builder of ``kind`` that passes on what ``options`` reads from a configuration."""
    return lambda config: kind(config.hidden_size, config.num_attention_heads, **options(config))


class HeadProjections(CheckedModule, ABC):
    """Base of attentions: ``W_q`` reads tokens, ``W_k`` and ``W_v`` a memory, ``W_o`` joins heads.

    A subclass defines in ``_weighted`` how queries and keys weigh the values, and uses ``dropout``.
    """

    memory_dim: int | None = None
    """Width of the input of keys and values; D if None."""

    def __init__(
        self, embed_dim: Size, num_heads: Size, *, dropout: Rate = 0.0, bias: bool = True
    ) -> None:
        super().__init__()
        self.head_dim = head_width(type(self).__name__, embed_dim, num_heads)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.dropout = dropout
        memory_dim = embed_dim if self.memory_dim is None else self.memory_dim
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.k_proj = nn.Linear(memory_dim, embed_dim, bias=bias)
        self.v_proj = nn.Linear(memory_dim, embed_dim, bias=bias)
        self.o_proj = nn.Linear(embed_dim, embed_dim, bias=bias)

    def _tokens(self, x: Tensor) -> Tensor:
        return x

    def _query(self, x: Tensor) -> Tensor:
        return split_heads(self.q_proj(x), self.num_heads)

    def _key_value(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        key = self.k_proj(memory)
        value = self.v_proj(memory)
        return split_heads(key, self.num_heads), split_heads(value, self.num_heads)

    @abstractmethod
    def _weighted(
        self, query: Tensor, key: Tensor, value: Tensor, mask: masks.AttentionMask
    ) -> Tensor:
        """Weighted means of the values, (batch, heads, tokens, d)."""


class SelfAttention(HeadProjections):
    """Attention of the tokens of a sequence to each other."""

    def forward(
        self,
        x: Tensor,
        *,
        key_padding_mask: masks.PaddingMask = None,
        is_causal: bool = False,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Attend from every token of `x` to the tokens that it may see; same shape as `x`.

        Arguments are those of `ATTENTIONS`. Keys in the cache are part of `key_padding_mask`; a
        finished mask will do as well. Raises `ShapeError` if x or the padding mask does not fit.
        """
        check_tokens(self, x, self.embed_dim, batched=True)
        masks.check_batch(key_padding_mask, x)
        x = self._tokens(x)
        query = self._query(x)
        key, value = self._key_value(x)
        if cache is not None:
            key, value = cache.update(key, value)
        mask = masks.attention_mask(
            key_padding_mask, is_causal, query.shape[-2], key.shape[-2], x.device
        )
        return self.o_proj(join_heads(self._weighted(query, key, value, mask)))


class MemoryAttention(HeadProjections):
    """Attention of tokens to a memory; ``memory_dim`` is the width of its tokens (default D)."""

    def __init__(
        self, embed_dim: Size, num_heads: Size, *, memory_dim: Size | None = None, **options: Any
    ) -> None:
        self.memory_dim = memory_dim
        super().__init__(embed_dim, num_heads, **options)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        *,
        key_padding_mask: masks.PaddingMask = None,
        cache: MemoryCache | None = None,
    ) -> Tensor:
        """Attend from every token of `x` to the real tokens of the memory; same shape as `x`.

        Arguments are those of `CROSS_ATTENTIONS`; the first call fills the cache. A memory of
        padding alone gives the bias of `W_o`. Raises `ShapeError` if x, the memory or the padding
        mask does not fit.
        """

        check_tokens(self, x, self.embed_dim, batched=True)
        check_tokens(self, memory, self.k_proj.in_features, name="memory", batched=True)
        if len(memory) not in (1, len(x)):
            raise ShapeError(
                f"{type(self).__name__}: received memory {tuple(memory.shape)} for x"
                f" {tuple(x.shape)}; expected a batch of {len(x)}, a memory for each sequence"
            )

        def project() -> tuple[Tensor, Tensor]:
            return self._key_value(self._tokens(memory))

        key, value = project() if cache is None else cache.once(project)
        mask = masks.memory_mask(key_padding_mask, memory)
        heads = self._weighted(self._query(self._tokens(x)), key, value, mask)
        return self.o_proj(join_heads(heads))
