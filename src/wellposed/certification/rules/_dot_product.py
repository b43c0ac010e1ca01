"""Dot-product attention: no global Lipschitz constant; on a ball it has one (theory note B5)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wellposed.certification._layer_bound import LayerBound, Refused, times
from wellposed.certification._rules_by_class import register_rule
from wellposed.certification._walk import RuleContext
from wellposed.certification.rules._attention_weights import (
    AttentionWeights,
    slices,
    weights_of,
)
from wellposed.certification.rules._near import nearer
from wellposed.linalg import Bound, MaskKind, certified_spectral_norm, smallest_bound
from wellposed.nn import DotProductAttention, InverseDAttention

_NO_GLOBAL_CONSTANT = (
    "dot-product attention has no global Lipschitz constant (Kim et al. 2021, Theorem 3.1), as"
    " L2SelfAttention has"
)


def refuse_dropout(module: nn.Module, rate: float) -> None:
    """Refuse attention with active dropout on its weights."""
    if module.training and rate > 0:
        raise Refused(
            "dropout on attention weights is on (training mode), for which no bound is proved; call"
            " module.eval()"
        )


def row_mass(seq_len: int, mask: MaskKind, spread: float) -> float:
    """Return ``kP >= |P|_2`` for softmax logits that differ by at most ``2 spread`` in a row (B5)."""
    decay = math.exp(-2 * spread) if math.isfinite(spread) else 0.0
    total = float(seq_len)
    if mask == "full":
        total = seq_len / (1 + (seq_len - 1) * decay)
    elif mask == "causal":
        total = float(
            (1 / (1 + decay * torch.arange(seq_len, dtype=torch.float64, device="cpu"))).sum()
        )
    return math.sqrt(min(seq_len, total) * (1 + 1e-12))


def averaged_values_radius(weights: AttentionWeights, radius: float) -> float:
    """Bound the 2-norm of outputs if each head averages ``x_j V_h + b_h`` with ``|x_j| <= R``."""
    # h: heads, d: of a head, e: of a token
    constant = torch.einsum("hd,hde->e", weights.value_bias, weights.output) + weights.output_bias
    spread = float(weights.join(weights.output.new_ones(len(weights.output)), "").value)
    return times(spread, radius) + float(constant.norm())


def in_norm(
    bound: Callable[..., Bound], context: RuleContext, width: int, out_radius: float
) -> LayerBound:
    """Convert bounds in tok and norm 2, or in norm sum, to the context's norm; NaN to infinity."""
    best = bound(norm="sum" if context.norm == "sum" else "tok")
    if context.norm == 2:
        by_tok = Bound(best.value * math.sqrt(context.seq_len), f"sqrt(N) x ({best.form})")
        best = smallest_bound([bound(norm=2), by_tok])
    elif context.norm == "inf":
        best = Bound(best.value * math.sqrt(width), f"sqrt(D) x ({best.form})")
    value = float(best.value)
    value = math.inf if math.isnan(value) else value
    return LayerBound(value, best.form, out_radius=out_radius, fresh=True)


@dataclass(frozen=True)
class _Terms:
    """Terms of B5 on a ball, one for each head and per unit of ``|V_h W_O,h|``."""

    query: Tensor
    """``a R^2``: what a move of the query does."""
    key: Tensor
    """``a R^2 + beta R``: what moves of the keys do."""
    spreads: Tensor
    """Largest logit."""
    query_size: Tensor
    key_size: Tensor
    joint_query: Tensor | None
    """Bound of the first term for all heads together and all factors, or None."""


def _terms(weights: AttentionWeights, radius: float, *, rotary: bool) -> _Terms:
    root = math.sqrt(weights.head_dim)
    query_norms = weights.query_norms
    key_norms = weights.key_norms
    query_size = query_norms * radius + weights.query_bias.norm(dim=-1)
    # The bias of keys drops out unless they are rotated.
    key_size = key_norms * radius + (weights.key_bias.norm(dim=-1) if rotary else 0.0)
    if rotary:
        query, key = (
            radius / root * (1 + 1e-12) * moved * size
            for moved, size in ((query_norms, key_size), (key_norms, query_size))
        )
        spreads = query_size * key_size / root * (1 + 1e-12)
        return _Terms(query, key, spreads, query_size, key_size, None)

    # h: heads, D: of a token, d: of a head
    shift = torch.einsum("hDd,hd->hD", weights.key, weights.query_bias).norm(dim=-1)
    square = radius * radius / root
    joint = weights.query_term
    joint = torch.where(joint > 0, joint * square, 0.0)
    query = weights.logits.norms * square
    key = query + shift / root * (1 + 1e-12) * radius
    return _Terms(query, key, key, query_size, key_size, joint)


def _with_query_term(
    weights: AttentionWeights, averages: Tensor, terms: _Terms, form: str
) -> Bound:
    """Bound all heads: averages and keys head by head, queries together, or all head by head."""
    if terms.joint_query is None:
        return weights.join(averages + terms.query, form)
    together = weights.join(averages, f"{form}, queries together")
    total = (together.value + terms.joint_query) * (1 + 1e-12)
    bound = Bound(total, together.form)
    if not weights.is_small:
        return bound
    return smallest_bound([bound, weights.join(averages + terms.query, form)])


def dot_product_ball_bound(
    weights: AttentionWeights,
    *,
    radius: float,
    seq_len: int,
    norm: Literal["tok", 2, "sum"] = "tok",
    mask: MaskKind = "any",
    rotary: bool = False,
) -> Bound:
    """Bound dot-product self-attention on ``|x_i| <= radius`` in norm tok, 2 or sum.

    Status: certified for any mask without empty rows. Source: theory notes B5, B14, B21; in norm 2 never
    above the constant of Castin, Ablin, Peyre (2024).

    Args:
        weights: Of all heads; biases of keys (unless ``rotary``) and values have no effect.
        radius: Largest 2-norm of a token.
        seq_len: Affects norms 2 and sum only; see `certify`.
        norm: ``"tok"``, ``2`` or ``"sum"``.
        mask: As `seq_len`.
        rotary: Queries and keys are rotated by their positions.
    """
    root = math.sqrt(weights.head_dim)
    terms = _terms(weights, radius, rotary=rotary)
    query = terms.query
    key = terms.key
    if norm == "tok":
        averages = 1 + key if rotary else (1 + key.square()).sqrt() * (1 + 1e-12)
        return _with_query_term(weights, averages, terms, "ball R, tok (B21)")

    masses = key.new_tensor([row_mass(seq_len, mask, float(spread)) for spread in terms.spreads])
    if norm == "sum":
        per_head = (masses.square() * (1 + 2 * key) + query) * (1 + 1e-12)
        # Heads may move different tokens, so a root of a sum of squares would be wrong.
        apart = (weights.paths.norms * per_head).sum() * (1 + 1e-12)
        return Bound(apart, "ball R, sum (B14), sum |V_h W_O,h| L_h")

    key_masses = masses.clamp_max(math.sqrt(seq_len / 2))
    averages = masses + key_masses * key
    if not rotary:
        both = masses * (1 + key.square()).sqrt() * (1 + 1e-12)
        averages = torch.minimum(averages, both)

    per_head = _with_query_term(weights, averages, terms, "ball R, norm 2 (B21)")
    # The multi-head form of B5 in norm 2: every head sees the whole perturbation once.
    value = weights.value_norms
    query_all, key_all, value_all = (
        certified_spectral_norm(part.movedim(0, 1).flatten(1), method="cholesky")
        for part in (weights.query, weights.key, weights.value)
    )
    bracket = (
        masses.amax() * value_all
        + radius / root * (value * terms.key_size).amax() * query_all
        + radius / root * key_masses.amax() * (value * terms.query_size).amax() * key_all
    )
    together = Bound(weights.output_norm * bracket, "ball R, norm 2, heads together (B5)")

    return smallest_bound([per_head, together])


@dataclass(frozen=True)
class HeadNorm:
    """LayerNorm on queries or keys: ``max |gamma|``, ``eps`` and the 2-norm of its bias."""

    gain: float
    eps: float
    shift: float = 0.0

    @classmethod
    def from_layer_norm(
        cls, module: nn.LayerNorm | None, head_dim: int, context: RuleContext
    ) -> HeadNorm:
        """Read a LayerNorm over the head dimension; refuse other norms."""
        form = (nn.LayerNorm, (head_dim,))
        shape = getattr(module, "normalized_shape", ())
        if module is None or (type(module), shape) != form or not module.eps > 0:
            raise Refused(
                f"its norms of queries and keys must both be LayerNorm({head_dim}) with eps > 0 to have"
                f" a bound: one is {module}"
            )
        context.reads(module)
        gain = 1.0 if module.weight is None else float(module.weight.detach().abs().max())
        shift = 0.0 if module.bias is None else float(module.bias.detach().double().norm())
        return cls(gain, float(module.eps), shift)


def qk_norm_ball_bound(
    weights: AttentionWeights,
    *,
    query_norm: HeadNorm,
    key_norm: HeadNorm,
    radius: float,
    seq_len: int,
    norm: Literal["tok", 2] = "tok",
    mask: MaskKind = "any",
) -> Bound:
    """Bound with LayerNorm on queries and keys and values on a ball, as in B6: in norm tok ``|W_V|
    (1 + R/sqrt d (s_k l_q + s_q l_k))``, s the size and l the slope of a normalised vector."""
    root = math.sqrt(weights.head_dim)
    size_q, size_k = (norm.gain * root + norm.shift for norm in (query_norm, key_norm))
    slope_q = weights.query_norms * query_norm.gain / math.sqrt(query_norm.eps)
    slope_k = weights.key_norms * key_norm.gain / math.sqrt(key_norm.eps)
    query = radius / root * size_k * slope_q
    key = radius / root * size_q * slope_k
    if norm == "tok":
        return weights.join(1 + query + key, "qk norm, ball R, tok (B5, B6)")
    mass = row_mass(seq_len, mask, size_q * size_k / root)
    key_mass = min(mass, math.sqrt(seq_len / 2))
    return weights.join(mass + query + key_mass * key, "qk norm, ball R, norm 2 (B5, B6)")


def on_the_ball(
    weights: AttentionWeights,
    context: RuleContext,
    bound: Callable[..., Bound] = dot_product_ball_bound,
    **options: Any,
) -> LayerBound:
    """Bound attention by B5 in the context's norm."""
    if math.isinf(context.radius):
        return context.refuse_without_ball(_NO_GLOBAL_CONSTANT)
    asked = {"radius": context.radius, "seq_len": context.seq_len, "mask": context.mask}

    def compute() -> LayerBound:
        out_radius = averaged_values_radius(weights, context.radius)
        in_any = partial(bound, weights, **asked, **options)
        return in_norm(in_any, context, weights.query.shape[1], out_radius)

    return context.remember(weights, f"ball, norm {context.norm}, {asked}", compute)


@register_rule(DotProductAttention)
def _dot_product(module: DotProductAttention, context: RuleContext) -> LayerBound:
    refuse_dropout(module, module.dropout)
    weights = weights_of(module, context)
    if module.q_norm is None and module.k_norm is None:
        return nearer(on_the_ball(weights, context), weights, context.centre_of(module), context)
    parts = (module.q_norm, module.k_norm)
    query, key = (HeadNorm.from_layer_norm(norm, module.head_dim, context) for norm in parts)
    return on_the_ball(weights, context, qk_norm_ball_bound, query_norm=query, key_norm=key)


@register_rule(InverseDAttention)
def _inverse_d(module: InverseDAttention, context: RuleContext) -> LayerBound:
    """Use weights of dot-product attention: queries include ``1/sqrt d``, the output is a third."""

    def scaled() -> AttentionWeights:
        weights = weights_of(module, context)
        query = weights.query * (math.sqrt(weights.head_dim) / module.head_dim)
        return replace(weights, query=query, output=weights.output / 3)

    return on_the_ball(context.remember(module, "inverse_d", scaled), context, rotary=True)


@register_rule(nn.MultiheadAttention)
def _multihead(module: nn.MultiheadAttention, context: RuleContext) -> LayerBound:
    """Bound self-attention ``x -> attention(x, x, x)``."""
    refuse_dropout(module, module.dropout)
    if not module.batch_first:
        return context.refuse(
            "its inputs are (tokens, batch, width), and a certificate is of (batch, tokens, width);"
            " set batch_first = True on it, which changes no weight, and call it with (batch,"
            " tokens, width)"
        )
    if module.in_proj_weight is None:
        return context.refuse(
            "its keys or values have a width of their own (kdim, vdim), so it is no self-attention"
        )
    if module.bias_k is not None or module.add_zero_attn:
        return context.refuse(
            "no bound is proved for the tokens that add_bias_kv and add_zero_attn append"
        )

    def read() -> AttentionWeights:
        sizes = [module.embed_dim] * 3
        query, key, value = slices(module.in_proj_weight, module.in_proj_bias, sizes)
        head_dim = module.embed_dim // module.num_heads
        return AttentionWeights.from_projections(query, key, value, module.out_proj, head_dim)

    weights = context.remember(module, "AttentionWeights", read)
    # Padded queries see real tokens, so a pattern is valid only without padding.
    bound = on_the_ball(weights, context)
    return nearer(bound, weights, context.centre_of(module), context)
