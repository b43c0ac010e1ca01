"""Scaled cosine attention: Lipschitz for any mask, of one sequence or two."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError
from wellposed.functional import cosine_attention
from wellposed.model_options import CosineOptions
from wellposed.nn._registry import ATTENTIONS, CROSS_ATTENTIONS
from wellposed.nn.attention.heads import HeadProjections, MemoryAttention, SelfAttention, builder
from wellposed.nn.attention.masks import AttentionMask
from wellposed.options import Positive, Rate, Size


class _CosineAttention(HeadProjections):
    """The scales that the self and the cross form share."""

    shown = ("num_heads", "eps", "dropout")

    log_tau: Tensor
    nu: Tensor

    def __init__(
        self,
        embed_dim: Size,
        num_heads: Size,
        *,
        eps: Positive = 0.01,
        tau: Positive | None = None,
        nu: float = 1.0,
        learn_scales: bool = True,
        dropout: Rate = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout=dropout, bias=bias)
        self.eps = eps
        self._start = (math.sqrt(self.head_dim) if tau is None else tau, nu)
        for scale in ("log_tau", "nu"):
            if learn_scales:
                self.register_parameter(scale, nn.Parameter(torch.empty(num_heads)))
            else:
                self.register_buffer(scale, torch.empty(num_heads))
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
        learn_scales: whether tau (through its logarithm) and nu are parameters; otherwise they are
            buffers.
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
        eps, tau, nu, learn_scales, dropout, bias: see `CosineSelfAttention`.

    Raises:
        ShapeError, ConfigError: as `CosineSelfAttention`.

    >>> attention = CosineCrossAttention(8, 2, memory_dim=6)
    >>> attention(torch.randn(3, 5, 8), torch.randn(3, 9, 6)).shape
    torch.Size([3, 5, 8])
    """


def _options(config: Any) -> dict[str, Any]:
    return {"eps": CosineOptions.of(config).cosine_eps, "dropout": config.attention_dropout}


def _self_options(config: Any) -> dict[str, Any]:
    if getattr(config, "qk_norm", False):
        raise ConfigError(
            "attention 'cosine' with qk_norm=True: queries and keys are normalised already, and"
            " LayerNorm has no useful Lipschitz bound; set qk_norm=False"
        )
    return _options(config)


ATTENTIONS.register("cosine")(builder(CosineSelfAttention, _self_options))
# ``qk_norm`` is for self-attentions; queries are normalised here anyway.
CROSS_ATTENTIONS.register("cosine")(builder(CosineCrossAttention, _options))
