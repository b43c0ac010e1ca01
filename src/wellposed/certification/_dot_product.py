"""Dot-product attention: no global Lipschitz constant, one on a ball (theory note B5)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from wellposed.certification._bounds import LayerBound
from wellposed.certification._heads import (
    TRAINING_DROPOUT,
    AttentionWeights,
    averaged_values_radius,
    in_norm,
    join_heads,
    norms,
    product_norms,
    row_mass,
    weights_of,
)
from wellposed.certification._rules import Refused, Site, register_rule
from wellposed.linalg import Bound, MaskKind, certified_spectral_norm, least
from wellposed.nn import DotProductAttention, InverseDAttention

_NO_GLOBAL_CONSTANT = (
    "dot-product attention has no global Lipschitz constant (Kim et al. 2021, Theorem 3.1), as"
    " L2SelfAttention has"
)


def dot_product_ball_bound(
    weights: AttentionWeights,
    *,
    radius: float,
    seq_len: int,
    norm: Literal["tok", 2] = "tok",
    mask: MaskKind = "any",
    rotary: bool = False,
) -> Bound:
    """Return the bound of dot-product self-attention on ``|x_i| <= radius`` in norm tok or 2 (B5).

    Per head, with ``a = |W_K W_Q^T|/sqrt d`` and ``beta = |W_K b_q|/sqrt d``: tok ``|W_V| (1 + 2 a
    R^2 + beta R)``; norm 2 ``|W_V| (kP + a R^2 + kK (a R^2 + beta R))``. Any mask with non-empty
    rows; key and value biases drop out. Never above the constant of Castin, Ablin, Peyre (2024).
    With ``rotary``, queries and keys are rotated by their
    positions: ``a R^2`` is ``|W_Q| (|W_K| R + |b_k|) R/sqrt d``, ``a R^2 + beta R`` so with q and k
    exchanged.
    """
    root = math.sqrt(weights.head_dim)
    sizes = _sizes(weights, radius, rotary=rotary)
    if rotary:
        query, key = (
            radius / root * (1 + 1e-12) * norms(moved) * size
            for moved, size in ((weights.query, sizes[1]), (weights.key, sizes[0]))
        )
        spreads = sizes[0] * sizes[1] / root * (1 + 1e-12)
    else:
        shift = (
            torch.einsum("hDd,hd->hD", weights.key, weights.query_bias).norm(dim=-1)
            / root
            * (1 + 1e-12)
        )
        query = product_norms(weights.key, weights.query) / root * radius**2
        spreads = key = query + shift * radius
    if norm == "tok":
        return join_heads(1 + query + key, weights, "ball R, tok (B5)")
    masses = key.new_tensor([row_mass(seq_len, mask, float(spread)) for spread in spreads])
    key_masses = masses.clamp_max(math.sqrt(seq_len / 2))
    per_head = join_heads(masses + query + key_masses * key, weights, "ball R, norm 2 (B5)")
    return least([per_head, _all_heads(weights, radius, sizes, masses, key_masses)])


def _sizes(weights: AttentionWeights, radius: float, *, rotary: bool) -> tuple[Tensor, Tensor]:
    """Largest 2-norm of a query and of a key, for each head; the bias of keys drops out where they
    are not rotated."""
    key_bias = weights.key_bias.norm(dim=-1) if rotary else 0.0
    return (
        norms(weights.query) * radius + weights.query_bias.norm(dim=-1),
        norms(weights.key) * radius + key_bias,
    )


def _all_heads(
    weights: AttentionWeights,
    radius: float,
    sizes: tuple[Tensor, Tensor],
    masses: Tensor,
    key_masses: Tensor,
) -> Bound:
    """The multi-head form of B5 in norm 2: every head sees the whole perturbation once."""
    value = weights.value_norms
    query_all, key_all, value_all = (
        certified_spectral_norm(part.movedim(0, 1).flatten(1), method="cholesky")
        for part in (weights.query, weights.key, weights.value)
    )
    scale = radius / math.sqrt(weights.head_dim)
    query_size, key_size = sizes
    bracket = (
        masses.amax() * value_all
        + scale * (value * key_size).amax() * query_all
        + key_masses.amax() * scale * (value * query_size).amax() * key_all
    )
    return Bound(weights.output_norm * bracket, "ball R, norm 2, heads together (B5)")


@dataclass(frozen=True)
class HeadNorm:
    """LayerNorm on queries or keys: ``max |gamma|``, ``eps`` and the 2-norm of its bias."""

    gain: float
    eps: float
    shift: float = 0.0

    @classmethod
    def of(cls, module: nn.Module | None, head_dim: int, site: Site) -> HeadNorm:
        """Read a LayerNorm over the head dimension, and no other norm."""
        form = (nn.LayerNorm, (head_dim,))
        if (type(module), getattr(module, "normalized_shape", ())) != form or module.eps <= 0:
            raise Refused(
                f"its norms of queries and keys are not both LayerNorm({head_dim}) with eps > 0, for"
                f" which alone a bound is proved: one is {module}"
            )
        site.reads(module)
        gain = 1.0 if module.weight is None else float(module.weight.detach().abs().max())
        shift = 0.0 if module.bias is None else float(module.bias.detach().double().norm())
        return cls(gain, float(module.eps), shift)


def qk_norm_ball_bound(
    weights: AttentionWeights,
    query_norm: HeadNorm,
    key_norm: HeadNorm,
    *,
    radius: float,
    seq_len: int,
    norm: Literal["tok", 2] = "tok",
    mask: MaskKind = "any",
) -> Bound:
    """Bound with LayerNorm on queries and keys, values on a ball: tok ``|W_V| (1 + R/sqrt d (s_k
    l_q + s_q l_k))``.

    As B6: ``s = sqrt(d) max|gamma| + |bias|`` bounds the normalised vector and ``l = |W| max|gamma|
    / sqrt eps`` its slope.
    """
    root = math.sqrt(weights.head_dim)
    size_q, size_k = (norm.gain * root + norm.shift for norm in (query_norm, key_norm))
    slope_q = norms(weights.query) * query_norm.gain / math.sqrt(query_norm.eps)
    slope_k = norms(weights.key) * key_norm.gain / math.sqrt(key_norm.eps)
    query, key = radius / root * size_k * slope_q, radius / root * size_q * slope_k
    if norm == "tok":
        return join_heads(1 + query + key, weights, "qk norm, ball R, tok (B5, B6)")
    mass = row_mass(seq_len, mask, size_q * size_k / root)
    key_mass = min(mass, math.sqrt(seq_len / 2))
    return join_heads(mass + query + key_mass * key, weights, "qk norm, ball R, norm 2 (B5, B6)")


@register_rule(DotProductAttention)
def _dot_product(module: DotProductAttention, site: Site) -> LayerBound:
    if module.training and module.dropout > 0:
        return site.refuse(TRAINING_DROPOUT)
    weights = weights_of(module, site)
    q_norm, k_norm = module.q_norm, module.k_norm
    bound: Callable[..., Bound]
    if q_norm is None and k_norm is None:
        bound = partial(dot_product_ball_bound, weights)
    else:
        norms_of = [HeadNorm.of(norm, module.head_dim, site) for norm in (q_norm, k_norm)]
        bound = partial(qk_norm_ball_bound, weights, *norms_of)
    return on_the_ball(bound, weights, site, module.embed_dim)


@register_rule(InverseDAttention)
def _inverse_d(module: InverseDAttention, site: Site) -> LayerBound:
    """Weights as of dot-product attention: the queries carry ``1/sqrt d``, the output a third."""
    weights = weights_of(module, site)
    scaled = replace(
        weights, query=weights.query / math.sqrt(module.head_dim), output=weights.output / 3
    )
    held = site.remember(module, "inverse_d", lambda: scaled)
    return on_the_ball(
        partial(dot_product_ball_bound, held, rotary=True), held, site, module.embed_dim
    )


def on_the_ball(
    bound: Callable[..., Bound], weights: AttentionWeights, site: Site, width: int
) -> LayerBound:
    """Ask a bound of B5 in the site's norm; ``width`` is that of a token."""
    if math.isinf(site.radius):
        return site.refuse_without_ball(_NO_GLOBAL_CONSTANT)
    asked = {"radius": site.radius, "seq_len": site.seq_len, "mask": site.mask}
    bound = partial(bound, **asked)

    def found() -> LayerBound:
        out_radius = averaged_values_radius(weights, site.radius)
        return in_norm(
            bound(norm="tok"), partial(bound, norm=2), site, width, out_radius=out_radius
        )

    return site.remember(weights, f"ball, norm {site.norm}, {asked}", found)
