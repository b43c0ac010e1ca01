"""Rules of attentions that have a constant on all inputs: L2 (theory note B1 to B4), cosine (B6), and
ball attention, whose tokens are projected first (B12)."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from wellposed.certification._attention import (
    TRAINING_DROPOUT,
    AttentionWeights,
    dot_product_ball_bound,
    in_norm,
    join_heads,
    norms,
    on_the_ball,
    product_norms,
    row_mass,
    weights_of,
)
from wellposed.certification._blocks import named
from wellposed.certification._rules import LayerBound, Site, refuse_always, register_rule, times
from wellposed.errors import ConfigError, WellposedError
from wellposed.linalg import (
    Bound,
    L2Layer,
    MaskKind,
    Norm,
    certified_spectral_norm,
    check_norm,
    l2_constants,
    least,
)
from wellposed.nn import (
    BallAttention,
    BallCrossAttention,
    BallEmbedding,
    BallProjection,
    CosineCrossAttention,
    CosineSelfAttention,
    L2SelfAttention,
    MaxMin,
    MaxMinFeedForward,
    UnitEmbedding,
)

Layers = tuple[L2Layer, L2Layer]


@register_rule(L2SelfAttention)
def _l2_self_attention(module: L2SelfAttention, site: Site) -> LayerBound:
    layers: Layers | None = None
    if module.contractive is not None:
        layers = site.remember(module, "bound_layers", lambda: module.bound_layers("cholesky"))
    reason = module.certificate_refusal(layers)
    if reason is not None:
        return site.refuse(
            f"L2 attention of this form, with these weights, has no Lipschitz constant: {reason}"
        )
    if layers is not None:
        return _contractive(module, site, layers)
    constants = l2_constants(site.seq_len, mask=site.mask)
    layer = site.remember(module, "L2Layer", lambda: module.bound_layers("cholesky")[1])
    bound = layer.bound(constants, norm=check_norm(site.norm))
    # sum_h |W_h| |C_h|: averages of x W_h stay within |W_h| R, and equal tokens pass a constant
    # through.
    spread = layer.bound(l2_constants(1), per_head_only=True).value
    radius = times(float(spread), site.radius) + _at_zero(module, 1, None)
    return LayerBound(float(bound.value), bound.form, out_radius=radius)


def _contractive(module: L2SelfAttention, site: Site, layers: Layers) -> LayerBound:
    # A layer with a weight of zeros is not scaled up to its constant: its bound is 0.
    full = all(bool(weight.any()) for weight in module.parameters() if weight.ndim > 1)
    sharp = module.bound == "sharp"
    if full and sharp and (module.norm, module.max_tokens) == (site.norm, site.seq_len):
        value = float(module.contractive or math.inf)
    else:
        asked = {"norm": check_norm(site.norm), "mask": site.mask, "layers": layers}
        try:
            value = float(module.lipschitz_bound(site.seq_len, **asked))
        except WellposedError as error:
            return site.refuse(str(error))
    # Being value-Lipschitz in tok, the output cannot leave the ball around its value at 0.
    bounded = site.norm == "tok" and math.isfinite(site.radius)
    radius = value * site.radius + _at_zero(module, site.seq_len, layers) if bounded else math.inf
    return LayerBound(value, f"divided by its bound in norm {module.norm}", out_radius=radius)


def _at_zero(module: L2SelfAttention, seq_len: int, layers: Layers | None) -> float:
    """Largest token of the output for zero inputs, whose tokens are all alike, at any number of
    tokens up to this.

    The scale of a contractive layer shrinks with the number of tokens, and the output is affine in
    it: the ends decide.
    """
    return max(float(module.at_zero(count, layers).norm()) for count in {1, seq_len}) * (1 + 1e-6)


def cosine_attention_bound(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    *,
    eps: float,
    temperature: Tensor | float,
    value_scale: Tensor | float = 1.0,
    seq_len: int,
    norm: Norm = "tok",
    mask: MaskKind = "any",
    output_norm: Tensor | None = None,
) -> Bound:
    """Return ``L >= Lip(nu softmax(tau n(x W_Q) . n(x W_K)) n(x W_V) W_O)``, where ``n(a) =
    a/sqrt(|a|^2 + eps)``.

    Certified on the whole space, for any mask that leaves no row empty (B6; after Qi et al., 2023,
    LipsFormer). tok: ``nu eps^-1/2 (|W_V| + tau |W_Q| + tau |W_K|)``; norm 2: ``nu eps^-1/2 (kP
    |W_V| + tau |W_Q| + tau kK |W_K|)`` with ``kP <= min(sqrt N, e^tau)`` under the full mask; inf:
    ``sqrt D`` times tok. Biases inside ``n`` are free.

    Args:
        query, key, value: ``(H, D, d)``, row convention ``x @ W_h``.
        output: ``W_O,h``, ``(H, d, E)``.
        eps: of the normalisation, > 0.
        temperature: tau, one number or one per head.
        value_scale: nu, one number or one per head.
        seq_len: at most this many tokens; only norm 2 depends on it.
        norm: ``"tok"``, ``"inf"`` or ``2``.
        mask: sharpens norm 2.
        output_norm: an upper bound of ``|W_O|``; computed where not given.

    Returns:
        `wellposed.linalg.Bound`, value in float64.

    Raises:
        ConfigError: ``eps <= 0`` (then there is no bound), or an unknown norm.

    >>> w = torch.eye(2).reshape(1, 2, 2)
    >>> round(float(cosine_attention_bound(w, w, w, w, eps=1.0, temperature=1.0, seq_len=9).value), 3)
    3.0
    """
    check_norm(norm)
    scales = {"eps": eps, "temperature": temperature, "value_scale": value_scale}
    terms = _terms(query, key, value, norm=norm, rows=seq_len, mask=mask, **scales)
    best = _joined(terms[0] + terms[1] + terms[2], output, norm, output_norm)
    if norm != "inf":
        return best
    return Bound(best.value * math.sqrt(query.shape[1]), f"sqrt(D) x ({best.form})")


def cosine_cross_attention_bounds(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    *,
    eps: float,
    temperature: Tensor | float,
    value_scale: Tensor | float = 1.0,
    num_queries: int,
    norm: Literal["tok", 2] = "tok",
) -> tuple[Bound, Bound]:
    """Return the bounds of cosine cross-attention with respect to the queries' sequence and to the
    memory (B6).

    Certified on the whole space for any mask that leaves no row empty. tok: ``nu eps^-1/2 tau
    |W_Q|`` and ``nu eps^-1/2 (|W_V| + tau |W_K|)``; norm 2: the second has ``sqrt(Nq) |W_V|`` and
    ``sqrt(Nq/2) tau |W_K|``. Moving
    both: their sum in tok, the root of the sum of squares in norm 2.

    Args:
        query: ``(H, D, d)``; ``key`` and ``value`` ``(H, E, d)`` act on the memory; ``output`` as
            there.
        num_queries: at most this many tokens of the queries' sequence; matters in norm 2.

    >>> w = torch.eye(2).reshape(1, 2, 2)
    >>> bounds = cosine_cross_attention_bounds(w, w, w, w, eps=1.0, temperature=3.0, num_queries=5)
    >>> [round(float(bound.value), 3) for bound in bounds]
    [3.0, 4.0]
    """
    # The number of memory tokens is free, so a row may attend to one token alone: the columns'
    # bound is sqrt(Nq).
    scales = {"eps": eps, "temperature": temperature, "value_scale": value_scale}
    terms = _terms(query, key, value, norm=norm, rows=num_queries, **scales)
    return _joined(terms[0], output, norm), _joined(terms[1] + terms[2], output, norm)


def _terms(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    eps: float,
    temperature: Tensor | float,
    value_scale: Tensor | float,
    norm: Norm,
    rows: int,
    mask: MaskKind = "any",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three terms of the Jacobian, of query, key and value, for each head."""
    if not eps > 0:
        raise ConfigError(
            f"cosine attention has a Lipschitz bound only for eps > 0, received eps={eps}"
        )
    tau = torch.as_tensor(temperature, dtype=torch.float64).detach().abs()
    scale = torch.as_tensor(value_scale, dtype=torch.float64).detach().abs() / math.sqrt(eps)
    mass = row_mass(rows, mask, float(tau.max())) if norm == 2 else 1.0
    key_mass = min(mass, math.sqrt(rows / 2)) if norm == 2 else 1.0
    by_key = key_mass * scale * tau * norms(key)
    return scale * tau * norms(query), by_key, mass * scale * norms(value)


def _joined(
    per_head: Tensor, output: Tensor, norm: Norm, through_output: Tensor | None = None
) -> Bound:
    if through_output is None:
        through_output = certified_spectral_norm(output.detach().flatten(0, 1), method="cholesky")
    together = through_output * per_head.square().sum().sqrt()
    apart = (per_head * norms(output)).sum()
    first = Bound(together, f"|W_O| sqrt(sum L_h^2), {norm} (B6)")
    return least([first, Bound(apart, f"sum L_h |W_O,h|, {norm} (B6)")])


@register_rule(CosineSelfAttention)
def _cosine_self_attention(module: CosineSelfAttention, site: Site) -> LayerBound:
    if module.training and module.dropout > 0:
        return site.refuse(TRAINING_DROPOUT)
    weights = weights_of(module, site)
    # A temperature rounded in the module's dtype may exceed the exact exponential by a unit in the
    # last place.
    tau = module.log_tau.detach().double().exp() * (1 + 2 * torch.finfo(module.log_tau.dtype).eps)
    nu = module.nu.detach().double().expand(len(weights.output))
    heads = (weights.query, weights.key, weights.value, weights.output)
    how: dict[str, Any] = {"eps": module.eps, "temperature": tau, "value_scale": nu}
    how |= {"seq_len": site.seq_len, "mask": site.mask, "output_norm": weights.output_norm}
    bound = partial(cosine_attention_bound, *heads, **how)
    # Each head's output is an average of vectors shorter than nu, whatever comes in.
    spread = min(weights.output_norm * nu.norm(), (norms(weights.output) * nu.abs()).sum())
    out_radius = float(spread + weights.output_bias.norm())
    in_two = partial(bound, norm=2)
    return in_norm(bound(norm="tok"), in_two, site, module.embed_dim, out_radius=out_radius)


refuse_always(
    "cross-attention has two inputs; bound them with"
    " wellposed.certification.cosine_cross_attention_bounds",
    CosineCrossAttention,
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
    moved_memory = join_heads(mass + by_key, weights, f"memory, {norm} (B12)")
    return join_heads(by_query, weights, f"queries, {norm} (B12)"), moved_memory


def _ball_weights(module: BallAttention | BallCrossAttention) -> AttentionWeights:
    """Weights as of dot-product attention: the queries carry ``t sqrt d``, the output ``w`` of
    their head."""
    parts = (module.q_proj, module.k_proj, module.v_proj, module.o_proj)
    weights = AttentionWeights.of(*parts, module.embed_dim // module.num_heads)
    dtype = module.mix_logit.dtype
    # Both scales are made in float32 at least and rounded once.
    computed = torch.promote_types(dtype, torch.float32)
    slack = 1 + torch.finfo(dtype).eps + 16 * torch.finfo(computed).eps
    temperature, mix = (slack * scale.detach() for scale in module.head_scales(torch.float64))
    stretch = (math.sqrt(weights.head_dim) * temperature)[:, None]
    return replace(
        weights,
        query=weights.query * stretch[..., None],
        query_bias=weights.query_bias * stretch,
        output=weights.output * mix[:, None, None],
    )
