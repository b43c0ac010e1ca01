"""The unit ball: the projection onto it, token vectors of norm 1, and attention there, which is
Lipschitz everywhere, with a constant that no length changes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.call_checks import checked_arguments
from wellposed.errors import ConfigError
from wellposed.model_options import BallOptions
from wellposed.nn._checks import Part, check_tokens, read_table
from wellposed.nn._registry import ATTENTIONS, CROSS_ATTENTIONS
from wellposed.nn.attention._heads import HeadProjections, MemoryAttention, SelfAttention, builder
from wellposed.nn.attention._masks import AttentionMask
from wellposed.options import Positive, Size
from wellposed.tensor_calls import attend


def project_to_ball(x: Tensor, radius: float = 1.0) -> Tensor:
    """Return ``pi(x) = x / max(1, |x| / radius)`` of each token, the nearest point of the ball.

    Computed in float32 at least; rounded to the dtype of ``x`` it may lie outside by a unit in the
    last place. A token whose square overflows (longer than 1e19 in float32) goes to zero.

    Args:
        x: (..., D).
        radius: > 0.

    >>> project_to_ball(torch.tensor([[3.0, 4.0], [0.3, 0.4]])).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.30000001192092896, 0.4000000059604645]]
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=exact)
    return (x * (radius / length.clamp_min(radius))).to(x.dtype)


class BallProjection(Part):
    r"""`pi(x) = x / max(1, |x| / R)` of each token: `|pi(x) - pi(y)| <= |x - y|` and
    `|pi(x)| <= R`.

    Exact up to rounding: the projection onto a closed convex set. 1-Lipschitz in norms tok and 2;
    in norm inf the constant is `(1 + sqrt D) / 2`, which is attained (theory note B12).

    Args:
        embed_dim: width D of a token.
        radius: R, finite and > 0.

    Raises:
        ConfigError: another width or radius. In `forward`, ShapeError: tokens of another width.

    Cost: one norm and one product for each token.
    When not to use: behind tokens that are inside the ball already; and it keeps directions only of
    those outside.

    >>> BallProjection(2)(torch.tensor([[0.0, 2.0]])).tolist()
    [[0.0, 1.0]]
    """

    shown = ("embed_dim", "radius")

    def __init__(self, embed_dim: Size, *, radius: Positive = 1.0) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.radius = float(radius)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to the same shape."""
        check_tokens(self, x, self.embed_dim)
        return project_to_ball(x, self.radius)


class BallEmbedding(nn.Embedding):
    r"""`v -> E_v / sqrt(1 + |E_v|^2)`: every token vector lies in the open unit ball, and words
    that say nothing may be short.

    Exact up to rounding, at the call: the table `weight` stays a plain parameter, whose rows may
    have any length, with a gradient along it everywhere. Exchanging one word for another moves one
    token by less than 2, and a short one by less than 1 plus its length (theory note B14).

    Args:
        num_embeddings: number of tokens.
        embedding_dim: width D.
        padding_idx, ...: everything that `torch.nn.Embedding` takes.

    Cost: a lookup and one norm for each token.
    When not to use: where every word should weigh the same: `UnitEmbedding`.

    >>> embedding = BallEmbedding(10, 4)
    >>> bool((embedding(torch.tensor([3, 7])).norm(dim=-1) < 1).all())
    True
    """

    __init__ = checked_arguments(nn.Embedding.__init__, num_embeddings=Size, embedding_dim=Size)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        """Map token ids (...) to (..., D)."""
        rows = read_table(self, input, self.num_embeddings, super().forward)
        return rows * (1 + rows.square().sum(-1, keepdim=True)).rsqrt()


class UnitEmbedding(nn.Embedding):
    r"""`v -> E_v / |E_v|`: every token vector has norm 1, so no word is far from, or close to,
    zero.

    Exact up to rounding, at the call: the table `weight` stays a plain parameter, and a step along
    a row changes nothing. A certificate speaks of the embedded tokens, which lie in a ball of
    radius 1; exchanging one word for another moves one token by 2 at most (theory note B12). A row
    of zeros, as that of `padding_idx`, stays zero.

    Args:
        num_embeddings: number of tokens.
        embedding_dim: width D.
        padding_idx, ...: everything that `torch.nn.Embedding` takes.

    Cost: a lookup and one norm for each token.
    When not to use: where the length of a word vector should carry its importance.

    >>> embedding = UnitEmbedding(10, 4)
    >>> bool(torch.allclose(embedding(torch.tensor([3, 7])).norm(dim=-1), torch.ones(2)))
    True
    """

    __init__ = checked_arguments(nn.Embedding.__init__, num_embeddings=Size, embedding_dim=Size)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        """Map token ids (...) to (..., D)."""
        rows = read_table(self, input, self.num_embeddings, super().forward)
        return F.normalize(rows, dim=-1, eps=torch.finfo(rows.dtype).tiny)


class _BallAttention(HeadProjections):
    """The temperatures and the mixture of heads that the self and the cross form share."""

    shown = ("num_heads", "max_temperature", "unit_lipschitz")

    def __init__(
        self,
        embed_dim: Size,
        num_heads: Size,
        *,
        temperature: Positive = 2.0,
        max_temperature: Positive = 10.0,
        unit_lipschitz: bool = True,
        bias: bool = False,
    ) -> None:
        super().__init__(embed_dim, num_heads, bias=bias)
        if temperature >= max_temperature:
            raise ConfigError(
                f"{type(self).__name__}: temperature={temperature} and"
                f" max_temperature={max_temperature}; expected temperature < max_temperature: the"
                " constant grows with 1 + 2 max_temperature"
            )
        self.max_temperature = float(max_temperature)
        self.unit_lipschitz = unit_lipschitz
        self._start = math.log(temperature) - math.log(max_temperature - temperature)
        self.temperature_logit = nn.Parameter(torch.empty(num_heads))
        self.mix_logit = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set every temperature to its start value and mix heads evenly; projections have their
        own."""
        nn.init.constant_(self.temperature_logit, self._start)
        nn.init.zeros_(self.mix_logit)

    def head_scales(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return the temperature t of each head and what its output is multiplied by, (heads,)
        each.

        Args:
            dtype: computed in this one, or in a wider one that the parameters have.
        """
        dtype = torch.promote_types(self.mix_logit.dtype, dtype)
        temperature = self.max_temperature * torch.sigmoid(self.temperature_logit.to(dtype))
        mix = self.mix_logit.to(dtype).softmax(0)
        divisor = (mix * (1 + 2 * temperature)).sum() if self.unit_lipschitz else 1.0
        return temperature, mix / divisor

    def _tokens(self, x: Tensor) -> Tensor:
        return project_to_ball(x)

    def _weighted(self, query: Tensor, key: Tensor, value: Tensor, seen: AttentionMask) -> Tensor:
        temperature, scale = (part.to(query.dtype)[:, None, None] for part in self.head_scales())
        query = query * temperature
        return attend(query, key, value, **seen.flags, scale=1.0) * scale


class BallAttention(SelfAttention, _BallAttention):
    r"""`sum_h w_h W_o,h f_h`, `f_h(X)_i = sum_j p_ij W_v,h u_j`,
    `p_i = softmax_j(t_h <W_q,h u_i, W_k,h u_j>)`.

    `u_j = pi(x_j)`, pi the projection onto the unit ball. Globally Lipschitz for every mask that
    leaves no row empty
    and every length: `|F(X) - F(Y)|_tok <= sum_h w_h |W_o,h W_v,h| (1 + 2 t_h |W_k,h^T W_q,h|) |X - Y|_tok`, and no
    output token is longer than `sum_h w_h |W_o,h W_v,h|` (theory note B12, proved; with a query
    bias b add `t_h |W_k,h^T b_h|` in the bracket). Weights w lie in the simplex, temperatures below
    a bound; both are learnt. `wellposed.certify` measures the weights: nothing is taken for
    orthogonal.

    Args:
        embed_dim: width D of a token.
        num_heads: number of heads; divides D; d = D / num_heads.
        temperature: t of every head at the start, between 0 and `max_temperature`.
        max_temperature: no head's t is above it; `t = max_temperature sigmoid(s)`.
        unit_lipschitz: divide the layer by `sum_h w_h (1 + 2 t_h)`, as it is at each call: then its
            constant is 1 in norm tok where no projection has a norm above 1 and queries have no
            bias.
        bias: whether projections have a bias. Those of keys, values and the output are free in the
            bound.

    Raises:
        ShapeError: `num_heads` does not divide `embed_dim`.
        ConfigError: `temperature` or `max_temperature` is out of its range.

    Cost: as `DotProductAttention` and three passes over the tokens; one fused kernel, no N x N
    tensor.
    When not to use: where the length of a token beyond 1 should count; the projection keeps its
    direction only.

    >>> attention = BallAttention(8, 2)
    >>> attention(torch.randn(3, 5, 8), is_causal=True).shape
    torch.Size([3, 5, 8])
    """


class BallCrossAttention(MemoryAttention, _BallAttention):
    r"""`BallAttention` from tokens `x` to a memory `y`: globally Lipschitz in both.

    In norm tok, without `unit_lipschitz`: `sum_h w_h t_h |W_o,h W_v,h| |W_k,h^T W_q,h|` with
    respect to x and `sum_h w_h |W_o,h W_v,h| (1 + t_h |W_k,h^T W_q,h|)` with respect to y (theory
    note B12, proved).

    Args:
        embed_dim: width D of a token of `x`.
        num_heads: number of heads; divides D.
        memory_dim: width of a token of the memory; D where not given.
        temperature, max_temperature, unit_lipschitz, bias: see `BallAttention`; the divisor is of
            moving both inputs.

    Raises:
        ShapeError, ConfigError: as `BallAttention`.

    >>> attention = BallCrossAttention(8, 2, memory_dim=6)
    >>> attention(torch.randn(3, 5, 8), torch.randn(3, 9, 6)).shape
    torch.Size([3, 5, 8])
    """


def _options(config: Any) -> dict[str, Any]:
    if config.attention_dropout or config.qk_norm:
        raise ConfigError(
            f"attention 'ball' with attention_dropout={config.attention_dropout} and"
            f" qk_norm={config.qk_norm}: dropped weights would leave the bound, and LayerNorm has no"
            " useful one; leave them 0 and False, and give dropout, which acts on whole branches"
        )
    given = BallOptions.of(config)
    return {"temperature": given.ball_temperature, "max_temperature": given.ball_max_temperature}


ATTENTIONS.register("ball")(builder(BallAttention, _options))
CROSS_ATTENTIONS.register("ball")(builder(BallCrossAttention, _options))
