"""Dot-product attention, of one sequence or two: scaled by 1/sqrt(d) or by 1/d, or between normalised
vectors (cosine attention)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError, ShapeError
from wellposed.functional import cosine_attention
from wellposed.model_options import CosineOptions
from wellposed.nn._positions import rotate_by_position
from wellposed.nn._registry import ATTENTIONS, CROSS_ATTENTIONS
from wellposed.nn.attention._heads import HeadProjections, MemoryAttention, SelfAttention, builder
from wellposed.nn.attention._masks import AttentionMask
from wellposed.options import Positive, Rate, Size, Strength
from wellposed.tensor_calls import attend


class SoftmaxHeads(HeadProjections):
    """`softmax(q k^T / sqrt(d)) v` per head, of one sequence or two; with ``qk_norm``, q and k pass
    a LayerNorm."""

    shown = ("num_heads", "dropout")

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

    def _weighted(self, query: Tensor, key: Tensor, value: Tensor, seen: AttentionMask) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return attend(query, key, value, **seen.flags, dropout_p=dropout)


class DotProductAttention(SelfAttention, SoftmaxHeads):
    """Per head, `softmax(q k^T / sqrt(d)) v` with `q = x W_q, k = x W_k, v = x W_v`; the heads are
    joined by `W_o`.

    Exact up to rounding. Vaswani et al. (2017), eq. 1, computed by `scaled_dot_product_attention`.
    With `qk_norm`, queries and keys pass a LayerNorm over the head dimension with a learnt scale
    and no bias (Dehghani et al. 2023, "Scaling Vision Transformers to 22 Billion Parameters", sec.
    2), so that |logit| <= sqrt(d) max|scale|^2.

    Args:
        embed_dim: width D of a token.
        num_heads: number of heads; divides D. Each head has dimension d = D / num_heads.
        qk_norm: normalise queries and keys per head.
        dropout: probability of dropping an attention weight in training, in [0, 1).
        bias: whether the four projections have a bias.
        eps: epsilon of the query and key norms.

    Raises:
        ShapeError: `num_heads` does not divide `embed_dim`.

    Cost: 4 N D^2 + 2 N^2 D multiply-adds for N tokens; memory O(N D), no N x N tensor with the
    fused kernels.
    Not Lipschitz on an unbounded domain: use an L2 attention where a certificate is wanted.

    >>> import torch
    >>> attention = DotProductAttention(8, 2)
    >>> attention(torch.randn(3, 5, 8), is_causal=True).shape
    torch.Size([3, 5, 8])
    """


class CrossAttention(MemoryAttention, SoftmaxHeads):
    """Per head, `softmax(q k^T / sqrt(d)) v` with `q = x W_q`, and `k = y W_k`, `v = y W_v` of a
    memory y.

    Exact up to rounding. Vaswani et al. (2017), sec. 3.2.3, computed by
    `scaled_dot_product_attention`. ``qk_norm`` as in `DotProductAttention`.

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

    Cost: 2 (N + M) D^2 + 2 N M D multiply-adds for N tokens and M of the memory; the part in M D^2
    once with a cache.
    Not Lipschitz on an unbounded domain: use `CosineCrossAttention` where a certificate is wanted.

    >>> import torch
    >>> attention = CrossAttention(8, 2)
    >>> attention(torch.randn(3, 5, 8), torch.randn(3, 9, 8)).shape
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
    r"""Per head, `softmax(q k^T / d) v / 3`, q and k rotated by position; the heads are joined by
    `W_o`. No bias.

    On tokens of root mean square 1 and with one head it is 1-Lipschitz in the largest root mean
    square of a token, where `W_q, W_k, W_v, W_o` are; with H heads it is not: the constant may
    reach `(1 + H)/3` (theory note B7). `wellposed.certify` measures the weights and counts the
    heads (B5, certified, on a ball). Large et al. (2024), "Scalable optimization in the modular
    norm"; Newhouse et al. (2025), "Training Transformers with Enforced Lipschitz Constants", sec.
    4.

    Args:
        embed_dim: width D of a token.
        num_heads: number of heads; divides D. Each head has dimension d = D / num_heads, which is
            even.

    Raises:
        ShapeError: `num_heads` does not divide `embed_dim`, or the width of a head is odd.

    Cost: as `DotProductAttention`.
    When not to use: where a constant is wanted on all inputs; take `BallAttention`.

    >>> import torch
    >>> attention = InverseDAttention(8, 2)
    >>> attention(torch.randn(3, 5, 8), is_causal=True).shape
    torch.Size([3, 5, 8])
    """

    shown = ("num_heads",)

    def __init__(self, embed_dim: Size, num_heads: Size) -> None:
        super().__init__(embed_dim, num_heads, bias=False)
        if self.head_dim % 2:
            raise ShapeError(
                f"InverseDAttention: heads of width {self.head_dim}; expected an even width, whose"
                " entries make pairs to rotate; change embed_dim or num_heads"
            )

    def _weighted(self, query: Tensor, key: Tensor, value: Tensor, seen: AttentionMask) -> Tensor:
        first = key.shape[-2] - query.shape[-2]
        query, key, value = rotate_by_position(query, first), rotate_by_position(key), value / 3
        scale = 1 / self.head_dim
        return attend(query, key, value, **seen.flags, scale=scale)


def _no_options(config: Any) -> dict[str, Any]:
    if config.attention_dropout or config.qk_norm:
        raise ConfigError(
            f"attention 'inverse_d' with attention_dropout={config.attention_dropout} and"
            f" qk_norm={config.qk_norm}: it drops no weights and normalises nothing; leave them 0"
            " and False"
        )
    return {}


ATTENTIONS.register("inverse_d")(builder(InverseDAttention, _no_options))


class _CosineAttention(HeadProjections):
    """The scales that the self and the cross form share."""

    shown = ("num_heads", "eps", "dropout")

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
        """Set temperature and output scale to their start values; projections have their own."""
        nn.init.constant_(self.log_tau, math.log(self._start[0]))
        nn.init.constant_(self.nu, self._start[1])

    @property
    def temperature(self) -> Tensor:
        """tau of each head, (heads,), positive."""
        return self.log_tau.exp()

    def _weighted(self, query: Tensor, key: Tensor, value: Tensor, seen: AttentionMask) -> Tensor:
        return cosine_attention(
            query,
            key,
            value,
            eps=self.eps,
            tau=self.temperature[:, None, None],
            nu=self.nu[:, None, None],
            **seen.flags,
            dropout_p=self.dropout if self.training else 0.0,
        )


class CosineSelfAttention(SelfAttention, _CosineAttention):
    r"""Per head, `nu softmax_j(tau n(q_i) . n(k_j)) n(v)` with `n(a) = a / sqrt(|a|^2 + eps)`;
    joined by `W_o`.

    Globally Lipschitz in exact arithmetic for every mask that leaves no row empty, diagonal or not:
    one head has `|F(X) - F(Y)|_tok <= nu eps^-1/2 (|W_V| + tau |W_Q| + tau |W_K|) |X - Y|_tok`,
    whatever the length (theory note B6; Qi et al. 2023, "LipsFormer"). `wellposed.certify` computes
    the bound of the layer. eps is a real knob: small eps means a steep map near zero queries.
    Rotations of queries and keys by position keep the bound.

    Args:
        embed_dim: width D of a token.
        num_heads: number of heads; divides D; d = D / num_heads.
        eps: > 0.
        tau: temperature at the start, one per head; `sqrt(d)` where not given, so that random
            directions give logits of variance one.
        nu: output scale at the start, one per head: no head output is longer. The bound is
            proportional to it.
        dropout: probability of dropping an attention weight in training, in [0, 1); the bound is
            for none dropped.
        bias: whether projections have a bias. Biases inside `n` cost nothing in the bound.

    Raises:
        ShapeError: `num_heads` does not divide `embed_dim`.
        ConfigError: `eps` or `tau` is not positive, or `dropout` is no probability below one.

    Cost: as `DotProductAttention`, plus three norms.
    When not to use: where the length of a value should count; `n` keeps directions only.

    >>> attention = CosineSelfAttention(8, 2)
    >>> attention(torch.randn(3, 5, 8), is_causal=True).shape
    torch.Size([3, 5, 8])
    """


class CosineCrossAttention(MemoryAttention, _CosineAttention):
    r"""Cosine attention from tokens `x` to a memory `y`: globally Lipschitz in both, which L2
    cross-attention is not.

    Per head, in the tok norm: `nu eps^-1/2 tau |W_Q|` with respect to x and
    `nu eps^-1/2 (|W_V| + tau |W_K|)` with respect to y (theory note B6). Formula and arguments as
    `CosineSelfAttention`.

    Args:
        embed_dim: width D of a token of `x`.
        num_heads: number of heads; divides D.
        memory_dim: width of a token of the memory; D where not given.
        eps, tau, nu, dropout, bias: see `CosineSelfAttention`.

    Raises:
        ShapeError, ConfigError: as `CosineSelfAttention`.

    >>> attention = CosineCrossAttention(8, 2, memory_dim=6)
    >>> attention(torch.randn(3, 5, 8), torch.randn(3, 9, 6)).shape
    torch.Size([3, 5, 8])
    """


def _cosine_options(config: Any) -> dict[str, Any]:
    return {"eps": CosineOptions.of(config).cosine_eps, "dropout": config.attention_dropout}


def _self_options(config: Any) -> dict[str, Any]:
    if getattr(config, "qk_norm", False):
        raise ConfigError(
            "attention 'cosine' with qk_norm=True: queries and keys are normalised already, and"
            " LayerNorm has no useful Lipschitz bound; set qk_norm=False"
        )
    return _cosine_options(config)


ATTENTIONS.register("cosine")(builder(CosineSelfAttention, _self_options))
# ``qk_norm`` is for self-attentions; queries are normalised here anyway.
CROSS_ATTENTIONS.register("cosine")(builder(CosineCrossAttention, _cosine_options))
