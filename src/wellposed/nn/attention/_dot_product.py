"""Dot-product attention of one sequence or two: scaled by 1/sqrt(d) or 1/d, and cosine."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError, ShapeError
from wellposed.functional import cosine_attention
from wellposed.model_options import CosineOptions
from wellposed.nn._positions import Rotations
from wellposed.nn._registry import ATTENTIONS, CROSS_ATTENTIONS
from wellposed.nn.attention._heads import HeadProjections, MemoryAttention, SelfAttention, builder
from wellposed.nn.attention._masks import AttentionMask
from wellposed.options import Positive, Rate, Size, Strength
from wellposed.second_derivatives import attend


class SoftmaxHeads(HeadProjections):
    """`softmax(q k^T / sqrt(d)) v` per head; with ``qk_norm``, q and k pass a LayerNorm."""

    repr_fields = ("num_heads", "dropout")

    def __init__(
        self,
        embed_dim: Size,
        num_heads: Size,
        *,
        qk_norm: bool = False,
        dropout: Rate = 0.0,
        bias: bool = True,
        eps: Strength = 1e-5,
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout=dropout, bias=bias)
        self.q_norm = nn.LayerNorm(self.head_dim, eps=eps, bias=False) if qk_norm else None
        self.k_norm = nn.LayerNorm(self.head_dim, eps=eps, bias=False) if qk_norm else None

    def _query(self, x: Tensor) -> Tensor:
        query = super()._query(x)
        return query if self.q_norm is None else self.q_norm(query).to(query.dtype)

    def _key_value(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super()._key_value(memory)
        return (key if self.k_norm is None else self.k_norm(key).to(key.dtype)), value

    def _weighted(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return attend(query, key, value, **mask.flags, dropout_p=dropout)


class DotProductAttention(SelfAttention, SoftmaxHeads):
    """Per head, `softmax(q k^T / sqrt(d)) v` with `q = x W_q, k = x W_k, v = x W_v`.

    `W_o` joins the heads. Exact up to rounding. Vaswani et al. (2017), eq. 1, computed by
    `scaled_dot_product_attention`. `qk_norm` puts a LayerNorm over the head dimension, with a
    learnt scale and no bias, on queries and keys, so that |logit| <= sqrt(d) max|scale|^2 (Dehghani
    et al. 2023, "Scaling Vision Transformers to 22 Billion Parameters", sec. 2).

    Args:
        embed_dim: Width D of a token.
        num_heads: Number of heads; divides D, else ShapeError. A head has dimension d = D /
            num_heads.
        qk_norm: Whether to normalise queries and keys per head.
        dropout: Probability of dropping an attention weight in training, in [0, 1).
        bias: Whether the four projections have a bias.
        eps: Epsilon of the norms of queries and keys.

    Cost: 4 N D^2 + 2 N^2 D multiply-adds for N tokens; memory O(N D) with the fused kernels.
    When not to use: for a certificate; it is not Lipschitz on all inputs. Use L2 or ball attention.

    >>> DotProductAttention(8, 2)(torch.randn(3, 5, 8), is_causal=True).shape
    torch.Size([3, 5, 8])
    """


class CrossAttention(MemoryAttention, SoftmaxHeads):
    """Per head, `softmax(q k^T / sqrt(d)) v` with `q = x W_q`, `k = y W_k`, `v = y W_v`, memory y.

    Exact up to rounding. Vaswani et al. (2017), sec. 3.2.3, by `scaled_dot_product_attention`.

    Args:
        embed_dim: As in `DotProductAttention`.
        num_heads: As in `DotProductAttention`.
        memory_dim: Width of a token of the memory; default D.
        **options: `qk_norm`, `dropout`, `bias` and `eps` of `DotProductAttention`.

    Cost: 2 (N + M) D^2 + 2 N M D multiply-adds for N tokens and M of the memory; the part in M D^2
    once with a cache.
    When not to use: for a certificate; it is not Lipschitz on all inputs. Use
    `CosineCrossAttention`.

    >>> CrossAttention(8, 2)(torch.randn(3, 5, 8), torch.randn(3, 9, 8)).shape
    torch.Size([3, 5, 8])
    """


def _options(config: Any) -> dict[str, Any]:
    return {
        "qk_norm": config.qk_norm,
        "dropout": config.attention_dropout,
        "eps": config.layer_norm_eps,
    }


ATTENTIONS.register("dot_product")(builder(DotProductAttention, _options))
CROSS_ATTENTIONS.register("dot_product")(builder(CrossAttention, _options))


class InverseDAttention(SelfAttention):
    """Per head, `softmax(q k^T / d) v / 3`, q and k rotated by position; joined by `W_o`. No bias.

    Proved (theory note B7): on tokens of root mean square (RMS) 1, one head is 1-Lipschitz in the
    largest RMS of a token if `W_q, W_k, W_v, W_o` are. With H heads the constant may reach
    `(1 + H)/3`. `wellposed.certify` measures the weights and counts the heads (B5, certified, on a
    ball). Large et al. (2024), "Scalable optimization in the modular norm"; Newhouse et al. (2025),
    "Training Transformers with Enforced Lipschitz Constants", sec. 4.

    Args:
        embed_dim: Width D of a token.
        num_heads: Number of heads; `d = D / num_heads` must be an even integer, else ShapeError.

    Cost: as `DotProductAttention`.
    When not to use: if the constant must hold on all inputs; use `BallAttention`.

    >>> InverseDAttention(8, 2)(torch.randn(3, 5, 8), is_causal=True).shape
    torch.Size([3, 5, 8])
    """

    repr_fields = ("num_heads",)

    def __init__(self, embed_dim: Size, num_heads: Size) -> None:
        super().__init__(embed_dim, num_heads, bias=False)
        if self.head_dim % 2:
            raise ShapeError(
                f"InverseDAttention: heads of width {self.head_dim}; expected an even width, to"
                " rotate pairs of entries; change embed_dim or num_heads"
            )

    def _weighted(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
        first = key.shape[-2] - query.shape[-2]
        rotate = mask.rotations or Rotations()
        query = rotate(query, first)
        key = rotate(key)
        value = value / 3
        scale = 1 / self.head_dim
        return attend(query, key, value, **mask.flags, scale=scale)


def _no_options(config: Any) -> dict[str, Any]:
    if config.attention_dropout or config.qk_norm:
        raise ConfigError(
            f"attention 'inverse_d' with attention_dropout={config.attention_dropout} and"
            f" qk_norm={config.qk_norm}: it supports neither; set them to 0 and False"
        )
    return {}


ATTENTIONS.register("inverse_d")(builder(InverseDAttention, _no_options))


class _CosineAttention(HeadProjections):
    """The scales that the self and the cross form share."""

    repr_fields = ("num_heads", "eps", "dropout")

    def __init__(
        self,
        embed_dim: Size,
        num_heads: Size,
        *,
        eps: Positive = 0.01,
        tau: Positive | None = None,
        nu: float = 1.0,
        dropout: Rate = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout=dropout, bias=bias)
        self.eps = eps
        self._start = (math.sqrt(self.head_dim) if tau is None else tau, nu)
        self.log_tau, self.nu = (nn.Parameter(torch.empty(num_heads)) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset temperature and output scale; the projections reset themselves."""
        nn.init.constant_(self.log_tau, math.log(self._start[0]))
        nn.init.constant_(self.nu, self._start[1])

    @property
    def temperature(self) -> Tensor:
        """tau of each head, (heads,), positive."""
        return self.log_tau.exp()

    def _weighted(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
        return cosine_attention(
            query,
            key,
            value,
            eps=self.eps,
            tau=self.temperature[:, None, None],
            nu=self.nu[:, None, None],
            **mask.flags,
            dropout_p=self.dropout if self.training else 0.0,
        )


class CosineSelfAttention(SelfAttention, _CosineAttention):
    """Per head, `nu softmax_j(tau n(q_i) . n(k_j)) n(v)`, `n(a) = a / sqrt(|a|^2 + eps)`.

    `W_o` joins the heads. Globally Lipschitz in exact arithmetic for every mask without empty rows,
    with or without its diagonal. One head has the constant
    `nu eps^-1/2 sqrt(|W_V|^2 + tau^2 max(|W_Q|, |W_K|)^2)` in norm tok, for any length (theory note
    B6, after Qi et al. 2023, "LipsFormer"). Rotating queries and keys by position keeps the bound.
    `wellposed.certify` computes the bound of the layer. A small eps makes the map steep near zero
    queries.

    Args:
        embed_dim: Width D of a token.
        num_heads: Number of heads, which divides D; d = D / heads.
        eps: > 0.
        tau: Start temperature of each head; default `sqrt(d)`, which gives logits of random
            directions variance one.
        nu: Start output scale of each head, a limit of its output's length; proportional to the
            bound.
        dropout: Probability of dropping an attention weight in training, in [0, 1); the bound
            assumes 0.
        bias: Whether projections have a bias; biases inside `n` do not change the bound.

    Raises:
        ShapeError: `num_heads` does not divide `embed_dim`.
        ConfigError: `eps` or `tau` is not positive, or `dropout` is not in [0, 1).

    Cost: as `DotProductAttention`, plus three norms.
    When not to use: if the length of a value matters; `n` keeps only directions.

    >>> CosineSelfAttention(8, 2)(torch.randn(3, 5, 8), is_causal=True).shape
    torch.Size([3, 5, 8])
    """


class CosineCrossAttention(MemoryAttention, _CosineAttention):
    """Cosine attention from tokens `x` to a memory `y`: globally Lipschitz in both, unlike L2.

    Per head, in norm tok: `nu eps^-1/2 tau |W_Q|` with respect to x and
    `nu eps^-1/2 (|W_V| + tau |W_K|)` with respect to y (theory note B6).

    Args:
        embed_dim: As in `CosineSelfAttention`, which also has the formula and the errors.
        num_heads: As in `CosineSelfAttention`.
        memory_dim: Width of a token of the memory; default D.
        **options: `eps`, `tau`, `nu`, `dropout` and `bias` of `CosineSelfAttention`.

    >>> attention = CosineCrossAttention(8, 2, memory_dim=6)
    >>> attention(torch.randn(3, 5, 8), torch.randn(3, 9, 6)).shape
    torch.Size([3, 5, 8])
    """


def _cosine_options(config: Any) -> dict[str, Any]:
    return {
        "eps": CosineOptions.from_config(config).cosine_eps,
        "dropout": config.attention_dropout,
    }


def _self_options(config: Any) -> dict[str, Any]:
    if getattr(config, "qk_norm", False):
        raise ConfigError(
            "attention 'cosine' with qk_norm=True: queries and keys are normalised already, and"
            " LayerNorm has no useful Lipschitz bound; set qk_norm=False"
        )
    return _cosine_options(config)


ATTENTIONS.register("cosine")(builder(CosineSelfAttention, _self_options))
# ``qk_norm`` applies to self-attentions; these queries are always normalised.
CROSS_ATTENTIONS.register("cosine")(builder(CosineCrossAttention, _cosine_options))
