"""What every multi-head attention does alike: cut a width into heads, join them, hold projections, attend to itself."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from wellposed.errors import ShapeError
from wellposed.nn._registry import LayerCache
from wellposed.nn.attention.masks import PaddingMask, attention_mask


def head_width(where: str, embed_dim: int, num_heads: int) -> int:
    """Return ``d = D / H``.

    Args:
        where: name of the class, for the message.
        embed_dim: width D.
        num_heads: number of heads H.

    Raises:
        ShapeError: ``num_heads`` is below 1 or does not divide ``embed_dim``.

    >>> head_width("Attention", 8, 2)
    4
    """
    if num_heads < 1 or embed_dim % num_heads:
        raise ShapeError(
            f"{where}: received embed_dim={embed_dim} and num_heads={num_heads}; expected a number of heads that "
            "divides the width; change one of them"
        )
    return embed_dim // num_heads


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Cut (batch, tokens, columns) into (batch, heads, tokens, columns / heads), a view.

    >>> import torch
    >>> split_heads(torch.zeros(3, 5, 8), 2).shape
    torch.Size([3, 2, 5, 4])
    """
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def join_heads(heads: Tensor) -> Tensor:
    """Put (batch, heads, tokens, d) side by side: (batch, tokens, heads d), the inverse of `split_heads`.

    >>> import torch
    >>> x = torch.randn(3, 5, 8)
    >>> torch.equal(join_heads(split_heads(x, 2)), x)
    True
    """
    return heads.transpose(1, 2).flatten(2)


class HeadProjections(nn.Module, ABC):
    """Base of attentions with four separate projections: ``W_q`` on tokens, ``W_k``, ``W_v`` on a memory, ``W_o``.

    A subclass says in ``_weighted`` how queries and keys make weights of the values.

    Args:
        embed_dim: width D of a token.
        num_heads: number of heads H; divides D; d = D / H.
        memory_dim: width of what keys and values are made of; D where not given.
        dropout: kept for the subclass.
        bias: whether the projections have a bias.

    Raises:
        ShapeError: ``num_heads`` does not divide ``embed_dim``.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, memory_dim: int | None = None, dropout: float = 0.0, bias: bool = True
    ) -> None:
        super().__init__()
        self.head_dim = head_width(type(self).__name__, embed_dim, num_heads)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.dropout = dropout
        memory_dim = embed_dim if memory_dim is None else memory_dim
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.k_proj = nn.Linear(memory_dim, embed_dim, bias=bias)
        self.v_proj = nn.Linear(memory_dim, embed_dim, bias=bias)
        self.o_proj = nn.Linear(embed_dim, embed_dim, bias=bias)

    def _heads(self, x: Tensor) -> Tensor:
        return split_heads(x, self.num_heads)

    def _query(self, x: Tensor) -> Tensor:
        return self._heads(self.q_proj(x))

    def _key_value(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        return self._heads(self.k_proj(memory)), self._heads(self.v_proj(memory))

    @abstractmethod
    def _weighted(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool = False
    ) -> Tensor:
        """Means of the values, (batch, heads, tokens, d); ``mask`` as in `AttentionMask`."""

    def _join(self, heads: Tensor) -> Tensor:
        """``W_o`` of the heads side by side: (batch, tokens, D)."""
        return self.o_proj(join_heads(heads))

    def _attend_to_itself(
        self, x: Tensor, key_padding_mask: PaddingMask, is_causal: bool, cache: LayerCache | None
    ) -> Tensor:
        query, (key, value) = self._query(x), self._key_value(x)
        if cache is not None:
            key, value = cache.update(key, value)
        allowed = attention_mask(key_padding_mask, is_causal, query.shape[-2], key.shape[-2], x.device)
        return self._join(self._weighted(query, key, value, allowed.mask, is_causal=allowed.is_causal))
