"""The unit ball: projection onto it, token vectors in it, and attention on it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.call_checks import checked_arguments
from wellposed.errors import ConfigError
from wellposed.model_options import BallOptions
from wellposed.nn._checks import CheckedModule, check_tokens, read_table
from wellposed.nn._registry import ATTENTIONS, CROSS_ATTENTIONS
from wellposed.nn.attention._heads import HeadProjections, MemoryAttention, SelfAttention, builder
from wellposed.nn.attention._masks import AttentionMask
from wellposed.options import Positive, Size
from wellposed.second_derivatives import attend


def project_to_ball(x: Tensor, radius: float = 1.0) -> Tensor:
    """Return ``pi(x) = x / max(1, |x| / radius)`` of each token of x (..., D), radius > 0.

    Computed in float32 at least; after rounding to the dtype of ``x`` it may lie outside by a unit
    in the last place. A token whose square overflows (longer than 1e19 in float32) becomes zero.

    >>> project_to_ball(torch.tensor([[3.0, 4.0], [0.3, 0.4]])).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.30000001192092896, 0.4000000059604645]]
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=exact)
    return (x * (radius / length.clamp_min(radius))).to(x.dtype)


class BallProjection(CheckedModule):
    """`pi(x) = x / max(1, |x| / R)` of each token, so that `|pi(x)| <= R`.

    Exact up to rounding. 1-Lipschitz in norms tok and 2; in norm inf the constant is
    `(1 + sqrt D) / 2`, which is attained (theory note B12).

    Args:
        embed_dim: Width D of a token; ShapeError in `forward` for another width.
        radius: R, finite and > 0, else ConfigError.

    Cost: one norm and one product for each token.
    When not to use: on tokens that are inside the ball already, or if lengths beyond R matter.

    >>> BallProjection(2)(torch.tensor([[0.0, 2.0]])).tolist()
    [[0.0, 1.0]]
    """

    repr_fields = ("embed_dim", "radius")

    def __init__(self, embed_dim: Size, *, radius: Positive = 1.0) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.radius = float(radius)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to the same shape."""
        check_tokens(self, x, self.embed_dim)
        return project_to_ball(x, self.radius)


class BallEmbedding(nn.Embedding):
    """`v -> E_v / sqrt(1 + |E_v|^2)`: tokens in the open unit ball; unimportant words may be short.

    Exact up to rounding, at the call: `weight` stays a plain parameter whose rows may have any
    length, and the gradient along a row never vanishes. Exchanging a word moves one token by less
    than 2, and a short one by less than 1 plus its length (theory note B14).

    Arguments are those of `torch.nn.Embedding`.

    Cost: a lookup and one norm for each token.
    When not to use: if all words should weigh the same; use `UnitEmbedding`.

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
    """`v -> E_v / |E_v|`: every token vector has norm 1.

    Exact up to rounding, at the call: `weight` stays a plain parameter, and a step along a row
    changes nothing. A certificate starts at the embedded tokens, in a ball of radius 1; exchanging
    a word moves one token by 2 at most (theory note B12). A row of zeros, such as that of
    `padding_idx`, stays zero.

    Arguments are those of `torch.nn.Embedding`.

    Cost: a lookup and one norm for each token.
    When not to use: if the length of a word vector should express its importance.

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

    repr_fields = ("num_heads", "max_temperature", "unit_lipschitz")

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
        """Reset temperatures and mix heads evenly; the projections reset themselves."""
        nn.init.constant_(self.temperature_logit, self._start)
        nn.init.zeros_(self.mix_logit)

    def head_scales(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return the temperature t and the output factor of each head, (heads,) each.

        Computed in ``dtype``, or in the parameters' dtype if that is wider.
        """
        dtype = torch.promote_types(self.mix_logit.dtype, dtype)
        temperature = self.max_temperature * torch.sigmoid(self.temperature_logit.to(dtype))
        mix = self.mix_logit.to(dtype).softmax(0)
        divisor = (mix * (1 + 2 * temperature)).sum() if self.unit_lipschitz else 1.0
        return temperature, mix / divisor

    def _tokens(self, x: Tensor) -> Tensor:
        return project_to_ball(x)

    def _weighted(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
        temperature, scale = (part.to(query.dtype)[:, None, None] for part in self.head_scales())
        query = query * temperature
        return attend(query, key, value, **mask.flags, scale=1.0) * scale


class BallAttention(SelfAttention, _BallAttention):
    """`sum_h w_h W_o,h f_h`, `f_h(X)_i = sum_j p_ij W_v,h u_j`, `u_j = pi(x_j)` in the unit ball.

    Weights are `p_i = softmax_j(t_h <W_q,h u_i, W_k,h u_j>)`. Proved (theory note B12): Lipschitz
    on all inputs, for every length and every mask without empty rows, in norm tok with the constant
    `sum_h w_h |W_o,h W_v,h| (1 + 2 t_h |W_k,h^T W_q,h|)`. A query bias b adds `t_h |W_k,h^T b_h|`
    in the bracket. No output token is longer than `sum_h w_h |W_o,h W_v,h|`, up to biases of values
    and output. Weights w (in the simplex) and temperatures are learnt. `wellposed.certify` measures
    the weights and assumes none to be orthogonal.

    Args:
        embed_dim: `D`, width of a token.
        num_heads: Number of heads, which divides D.
        temperature: `t` of every head at the start, between 0 and `max_temperature`.
        max_temperature: Upper limit of t; `t = max_temperature sigmoid(s)`.
        unit_lipschitz: Divide the layer at each call by `sum_h w_h (1 + 2 t_h)`. The constant in
            norm tok is then 1 if no projection has a norm above 1 and queries have no bias.
        bias: Whether projections have a bias; only that of the queries enters the bound.

    Raises:
        ShapeError: `num_heads` does not divide `embed_dim`.
        ConfigError: `temperature` or `max_temperature` is out of its range.

    Cost: as `DotProductAttention` plus three passes over the tokens; one fused kernel, no N x N
    tensor.
    When not to use: if lengths beyond 1 matter; the projection keeps only the direction.

    >>> BallAttention(8, 2)(torch.randn(3, 5, 8), is_causal=True).shape
    torch.Size([3, 5, 8])
    """


class BallCrossAttention(MemoryAttention, _BallAttention):
    """`BallAttention` from tokens `x` to a memory `y`: globally Lipschitz in both.

    Proved (theory note B12), in norm tok without `unit_lipschitz`:
    `sum_h w_h t_h |W_o,h W_v,h| |W_k,h^T W_q,h|` with respect to x and
    `sum_h w_h |W_o,h W_v,h| (1 + t_h |W_k,h^T W_q,h|)` with respect to y.

    Args:
        embed_dim: As in `BallAttention`, which also has the errors.
        num_heads: As in `BallAttention`.
        memory_dim: Width of a token of the memory; default D.
        **options: `temperature`, `max_temperature`, `unit_lipschitz` (the divisor is for moves of
            both inputs) and `bias` of `BallAttention`.

    >>> attention = BallCrossAttention(8, 2, memory_dim=6)
    >>> attention(torch.randn(3, 5, 8), torch.randn(3, 9, 6)).shape
    torch.Size([3, 5, 8])
    """


def _options(config: Any) -> dict[str, Any]:
    if config.attention_dropout or config.qk_norm:
        raise ConfigError(
            f"attention 'ball' with attention_dropout={config.attention_dropout} and"
            f" qk_norm={config.qk_norm}: the bound covers no dropped weights, and LayerNorm has no"
            " useful one; set them to 0 and False, and use dropout, which acts on whole branches"
        )
    read = BallOptions.from_config(config)
    return {"temperature": read.ball_temperature, "max_temperature": read.ball_max_temperature}


ATTENTIONS.register("ball")(builder(BallAttention, _options))
CROSS_ATTENTIONS.register("ball")(builder(BallCrossAttention, _options))
