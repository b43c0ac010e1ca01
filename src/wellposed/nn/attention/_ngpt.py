"""Attention of the normalized Transformer (nGPT): queries and keys of unit norm, scaled as learnt."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from wellposed.errors import ConfigError, ShapeError
from wellposed.nn._ngpt import LearnedScale, unit_vectors
from wellposed.nn._positions import Rotations
from wellposed.nn._registry import ATTENTIONS
from wellposed.nn.attention._heads import SelfAttention, builder
from wellposed.nn.attention._masks import AttentionMask
from wellposed.options import Rate, Size
from wellposed.second_derivatives import attend


class NGPTAttention(SelfAttention):
    """Per head, `softmax(sqrt(d) q k^T) v`, `q = R s n(W_q x)`, `k = R s n(W_k x)`, `n(a) = a / |a|`.

    Exact up to rounding. R rotates by position, `s` is learnt, 1 at the start, one factor for each
    entry of a head. `W_o` joins the heads; no bias. No logit is above `sqrt(d) max(s^2)` of its head.
    Loshchilov et al. (2025, arXiv 2410.01131), "nGPT", sec. 2.3. Their code rotates before it scales;
    if `s` differs within a pair of entries, logits then depend on absolute positions, so on padding.

    Args:
        embed_dim: Width D of a token.
        num_heads: Number of heads; `d = D / num_heads` must be an even integer, else ShapeError.
        dropout: Probability of dropping an attention weight in training, in [0, 1).

    Cost: as `DotProductAttention`, and six passes over queries and keys.
    When not to use: for a certificate; `n` has no Lipschitz constant near 0. Use `BallAttention`.

    >>> import torch
    >>> NGPTAttention(8, 2)(torch.randn(3, 5, 8), is_causal=True).shape
    torch.Size([3, 5, 8])
    """

    repr_fields = ("num_heads", "dropout")

    def __init__(self, embed_dim: Size, num_heads: Size, *, dropout: Rate = 0.0) -> None:
        super().__init__(embed_dim, num_heads, dropout=dropout, bias=False)
        if self.head_dim % 2:
            raise ShapeError(
                f"NGPTAttention: heads of width {self.head_dim}; expected an even width, to rotate"
                " pairs of entries; change embed_dim or num_heads"
            )
        # A vector, as decay and Muon take matrices.
        self.qk_scale = LearnedScale(embed_dim, unit=1.0 / math.sqrt(embed_dim))

    def _weighted(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
        first = key.shape[-2] - query.shape[-2]
        # (heads d,) -> (heads, 1, d), beside (batch, heads, T, d)
        scale = self.qk_scale.factors().unflatten(0, (self.num_heads, 1, self.head_dim))
        rotate = mask.rotations or Rotations()
        query = rotate(unit_vectors(query) * scale, first)
        key = rotate(unit_vectors(key) * scale)
        dropout = self.dropout if self.training else 0.0
        return attend(
            query.to(value.dtype),
            key.to(value.dtype),
            value,
            **mask.flags,
            scale=math.sqrt(self.head_dim),
            dropout_p=dropout,
        )


def _options(config: Any) -> dict[str, Any]:
    if config.qk_norm:
        raise ConfigError(
            "attention 'ngpt' with qk_norm=True: queries and keys have norm 1 already; set"
            " qk_norm=False"
        )
    return {"dropout": config.attention_dropout}


ATTENTIONS.register("ngpt")(builder(NGPTAttention, _options))
