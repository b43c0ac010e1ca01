"""Ball attention, the projection it is made with, and the parts that go with it (theory note
B12)."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Literal

import torch

from wellposed.certification._attention import (
    AttentionWeights,
    dot_product_ball_bound,
    join_heads,
    on_the_ball,
    product_norms,
)
from wellposed.certification._blocks import named
from wellposed.certification._rules import LayerBound, Site, refuse_always, register_rule
from wellposed.errors import ConfigError
from wellposed.linalg import Bound
from wellposed.nn import (
    BallAttention,
    BallCrossAttention,
    BallEmbedding,
    BallProjection,
    MaxMin,
    MaxMinFeedForward,
    UnitEmbedding,
)


@register_rule(BallProjection, sums=True)
def _ball_projection(module: BallProjection, site: Site) -> LayerBound:
    if site.radius <= module.radius:
        form = "identity inside the ball"
        return LayerBound(1.0, form, "exact", out_radius=site.radius, skip=1.0)
    factor = (1 + math.sqrt(module.embed_dim)) / 2 if site.norm == "inf" else 1.0
    return LayerBound(factor, "projection onto a ball", "exact", out_radius=module.radius)


@register_rule(MaxMin, sums=True)
def _maxmin(module: MaxMin, site: Site) -> LayerBound:
    del module
    return LayerBound(1.0, "a permutation almost everywhere", "exact", out_radius=site.radius)


@register_rule(MaxMinFeedForward, sums=True)
def _maxmin_feedforward(module: MaxMinFeedForward, site: Site) -> LayerBound:
    return site.chain(named(module, "up_proj", "activation", "down_proj"))


refuse_always(
    "it maps token ids, for which there is no Lipschitz constant; certify what follows it, with"
    " radius=1, since no token vector has a norm above 1 and a word exchanged for another moves one"
    " token by 2 at most",
    UnitEmbedding,
    BallEmbedding,
)
refuse_always(
    "cross-attention has two inputs; bound them with"
    " wellposed.certification.ball_cross_attention_bounds",
    BallCrossAttention,
)


@register_rule(BallAttention, sums=True)
def _ball_attention(module: BallAttention, site: Site) -> LayerBound:
    weights = site.remember(module, "ball_weights", lambda: _ball_weights(module))
    bound, inside = partial(dot_product_ball_bound, weights), site.at_radius(min(1.0, site.radius))
    return on_the_ball(bound, weights, inside, module.embed_dim)


def ball_cross_attention_bounds(
    module: BallCrossAttention, *, num_queries: int, norm: Literal["tok", 2] = "tok"
) -> tuple[Bound, Bound]:
    """Return the bounds of ball cross-attention with respect to the queries' sequence and to the
    memory (B12).

    Certified on the whole space for any mask that leaves no row empty, any length of the memory,
    and the weights as they are. Per head and unit of ``w |W_o W_v|``, with ``a = t |W_k^T W_q|``,
    ``beta = t |W_k^T b_q|``: tok ``a`` and ``1 + a + beta``; norm 2 ``a`` and ``sqrt(Nq) +
    sqrt(Nq/2) (a + beta)``. Moving both: their sum in tok, the root of the sum of squares in norm
    2.

    Args:
        module: its projections are measured; hooks on it are not seen.
        num_queries: at most this many tokens of the queries' sequence; matters in norm 2.
        norm: ``"tok"`` or ``2``.

    Raises:
        ConfigError: ``norm`` or ``num_queries`` is another.

    >>> bounds = ball_cross_attention_bounds(BallCrossAttention(8, 2), num_queries=5)
    >>> bool(bounds[0].value < 1)
    True
    """
    if norm not in ("tok", 2) or num_queries < 1:
        raise ConfigError(
            f"ball_cross_attention_bounds: norm={norm!r}, num_queries={num_queries}; expected norm"
            " 'tok' or 2, and at least one query"
        )
    weights = _ball_weights(module)
    root = math.sqrt(weights.head_dim)
    by_query = product_norms(weights.key, weights.query) / root
    shift = torch.einsum("hDd,hd->hD", weights.key, weights.query_bias).norm(dim=-1) / root
    # All queries may attend to one token of the memory.
    mass = math.sqrt(num_queries) if norm == 2 else 1.0
    key_mass = min(mass, math.sqrt(num_queries / 2)) if norm == 2 else 1.0
    by_key = key_mass * (by_query + shift) * (1 + 1e-12)
    return join_heads(by_query, weights, f"queries, {norm} (B12)"), join_heads(
        mass + by_key, weights, f"memory, {norm} (B12)"
    )


def _ball_weights(module: BallAttention | BallCrossAttention) -> AttentionWeights:
    """Weights as of dot-product attention: the queries carry ``t sqrt d``, the output ``w`` of
    their head."""
    weights = AttentionWeights.of(
        module.q_proj, module.k_proj, module.v_proj, module.o_proj, module.head_dim
    )
    dtype = module.mix_logit.dtype
    # Both scales are made in float32 at least and rounded once.
    slack = (
        1 + torch.finfo(dtype).eps + 16 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    )
    temperature, mix = (slack * scale.detach() for scale in module.head_scales(torch.float64))
    stretch = (math.sqrt(weights.head_dim) * temperature)[:, None]
    return replace(
        weights,
        query=weights.query * stretch[..., None],
        query_bias=weights.query_bias * stretch,
        output=weights.output * mix[:, None, None],
    )
