"""Dot-product attention: no global Lipschitz constant, one on a ball (theory note B5); and what
every rule of attention shares, the weights per head in row convention (``query = x W_h + b_h``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from wellposed.certification._walk import LayerBound, Refused, RuleContext, register_rule, times
from wellposed.linalg import Bound, MaskKind, certified_spectral_norm, least
from wellposed.nn import DotProductAttention, InverseDAttention
from wellposed.nn.attention import HeadProjections

_NO_GLOBAL_CONSTANT = (
    "dot-product attention has no global Lipschitz constant (Kim et al. 2021, Theorem 3.1), as"
    " L2SelfAttention has"
)


def refuse_dropout(module: nn.Module, rate: float) -> None:
    """Refuse attention whose weights are dropped."""
    if module.training and rate > 0:
        raise Refused(
            "dropout on attention weights is on (training mode), for which no bound is proved; call"
            " module.eval()"
        )


@dataclass(frozen=True)
class Slice:
    """A projection that is a part of a larger weight."""

    weight: Tensor
    bias: Tensor | None


Affine: TypeAlias = nn.Linear | Slice
"""``x -> weight @ x + bias``."""


def slices(weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> list[Slice]:
    """Cut a fused projection (rows are outputs) into those it is made of."""
    biases = [None] * len(sizes) if bias is None else bias.split(list(sizes))
    return [Slice(*pair) for pair in zip(weight.split(list(sizes)), biases, strict=True)]


@dataclass(frozen=True)
class AttentionWeights:
    """Query, key, value (H, D, d) and output (H, d, E) with biases; rotated keys need theirs."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    query_bias: Tensor
    key_bias: Tensor
    value_bias: Tensor
    output_bias: Tensor

    @classmethod
    def of(
        cls, query: Affine, key: Affine, value: Affine, output: Affine, head_dim: int
    ) -> AttentionWeights:
        """Cut four projections into heads of this width, however many there are; float64."""
        widths = [part.weight.shape[0] for part in (query, key, value)]
        if len({*widths, output.weight.shape[1]}) > 1 or widths[0] % head_dim:
            raise Refused(
                f"queries, keys and values are {widths} wide and its output reads"
                f" {output.weight.shape[1]}, which is not the same number of heads of {head_dim}"
            )

        def bias(part: Affine) -> Tensor:
            given = part.weight.new_zeros(len(part.weight)) if part.bias is None else part.bias
            return given.detach().double()

        inward = (query, key, value)
        q, k, v = (p.weight.detach().double().unflatten(0, (-1, head_dim)).mT for p in inward)
        bq, bk, bv = (bias(part).unflatten(0, (-1, head_dim)) for part in inward)
        out = output.weight.detach().double().mT.unflatten(0, (-1, head_dim))
        return cls(q, k, v, out, bq, bk, bv, bias(output))

    @property
    def head_dim(self) -> int:
        return self.query.shape[-1]

    @cached_property
    def output_norm(self) -> Tensor:
        """``|W_O|``."""
        return certified_spectral_norm(self.output.flatten(0, 1), method="cholesky")

    @cached_property
    def value_norms(self) -> Tensor:
        """``|V_h|``."""
        return norms(self.value)

    @cached_property
    def path_norms(self) -> Tensor:
        """``|V_h W_O,h|``."""
        return product_norms(self.value, self.output.mT)


def weights_of(module: HeadProjections, context: RuleContext) -> AttentionWeights:
    """The weights of a module, with the norms that they have already needed in this certificate."""
    parts = (module.q_proj, module.k_proj, module.v_proj, module.o_proj)
    head_dim = module.embed_dim // module.num_heads
    return context.remember(
        module, "AttentionWeights", lambda: AttentionWeights.of(*parts, head_dim)
    )


def norms(weights: Tensor) -> Tensor:
    """Certified spectral norm of each matrix of a batch, float64."""
    return certified_spectral_norm(weights.detach())


def product_norms(left: Tensor, right: Tensor) -> Tensor:
    """Spectral norms of ``A B^T`` for thin A, B (H, D, d) through their triangular factors, never
    forming D x D."""
    factors = [torch.linalg.qr(matrix.double(), mode="r").R for matrix in (left, right)]
    sizes = [torch.linalg.matrix_norm(factor) for factor in factors]
    # What rounding may have taken from it counts where the product cancels.
    unit = 8 * sum(left.shape[-2:]) * torch.finfo(torch.float64).eps
    return norms(factors[0] @ factors[1].mT) + unit * sizes[0] * sizes[1]


def row_mass(seq_len: int, mask: MaskKind, spread: float) -> float:
    """Return ``kP >= |P|_2`` for softmax logits that differ by at most ``2 spread`` within a row
    (B5).

    ``kP^2 = min(N, sum_i 1/(1 + (n_i - 1) e^(-2 spread)))``, ``n_i`` the keys that query i sees.
    """
    decay = math.exp(-2 * spread) if math.isfinite(spread) else 0.0
    total = float(seq_len)
    if mask == "full":
        total = seq_len / (1 + (seq_len - 1) * decay)
    elif mask == "causal":
        total = float((1 / (1 + decay * torch.arange(seq_len, dtype=torch.float64))).sum())
    return math.sqrt(min(seq_len, total) * (1 + 1e-12))


def join_heads(per_head: Tensor, weights: AttentionWeights, form: str) -> Bound:
    """Bound ``concat_h(head_h) W_O`` where head h is ``per_head[h]``-Lipschitz *per unit of*
    ``|W_V,h|`` (L6).

    The least of ``|W_O| sqrt(sum |V_h|^2 L_h^2)`` and ``sum |V_h W_O,h| L_h``, for norms tok and 2.
    """
    joined = weights.output_norm * (weights.value_norms * per_head).square().sum().sqrt()
    apart = (weights.path_norms * per_head).sum()
    first = Bound(joined, f"{form}, |W_O| sqrt(sum L_h^2)")
    return least([first, Bound(apart, f"{form}, sum |V_h W_O,h| L_h")])


def averaged_values_radius(weights: AttentionWeights, radius: float) -> float:
    """2-norm that no output token exceeds when each head averages ``x_j V_h + b_h`` over tokens
    with ``|x_j| <= R``."""
    constant = torch.einsum("hd,hde->e", weights.value_bias, weights.output) + weights.output_bias
    joined = weights.output_norm * weights.value_norms.square().sum().sqrt()
    spread = min(float(weights.path_norms.sum()), float(joined))
    return times(spread, radius) + float(constant.norm())


def in_norm(
    bound: Callable[..., Bound], context: RuleContext, width: int, out_radius: float
) -> LayerBound:
    """Turn bounds in tok and norm 2, or in norm sum, into one in the context's norm.

    ``|.|_tok <= |.|_2 <= sqrt(N) |.|_tok`` and ``|.|_inf <= |.|_tok <= sqrt(D) |.|_inf`` give the
    other two routes. A bound that overflowed, times 0 too, is infinite.
    """
    best = bound(norm="sum" if context.norm == "sum" else "tok")
    if context.norm == 2:
        by_tok = Bound(best.value * math.sqrt(context.seq_len), f"sqrt(N) x ({best.form})")
        best = least([bound(norm=2), by_tok])
    elif context.norm == "inf":
        best = Bound(best.value * math.sqrt(width), f"sqrt(D) x ({best.form})")
    value = float(best.value)
    return LayerBound(math.inf if math.isnan(value) else value, best.form, out_radius=out_radius)


def dot_product_ball_bound(
    weights: AttentionWeights,
    *,
    radius: float,
    seq_len: int,
    norm: Literal["tok", 2, "sum"] = "tok",
    mask: MaskKind = "any",
    rotary: bool = False,
) -> Bound:
    """Return the bound of dot-product self-attention on ``|x_i| <= radius`` in norm tok, 2 or sum
    (B5, B14).

    Per head, with ``a = |W_K W_Q^T|/sqrt d`` and ``beta = |W_K b_q|/sqrt d``: tok ``|W_V| (1 + 2 a
    R^2 + beta R)``; norm 2 ``|W_V| (kP + a R^2 + kK (a R^2 + beta R))``; sum ``|W_V| (kP^2 + a R^2 +
    2 kP^2 (a R^2 + beta R))``. Any mask with non-empty rows; key and value biases drop out. Never
    above the constant of Castin, Ablin, Peyre (2024) in norm 2.
    With ``rotary``, queries and keys are rotated by their positions: ``a R^2`` is ``|W_Q| (|W_K| R
    + |b_k|) R/sqrt d``, ``a R^2 + beta R`` so with q and k exchanged.
    """
    root = math.sqrt(weights.head_dim)
    # Largest query and key of each head; the bias of keys drops out where they are not rotated.
    key_bias = weights.key_bias.norm(dim=-1) if rotary else 0.0
    query_norms, key_norms = norms(weights.query), norms(weights.key)
    query_size = query_norms * radius + weights.query_bias.norm(dim=-1)
    key_size = key_norms * radius + key_bias
    if rotary:
        query, key = (
            radius / root * (1 + 1e-12) * moved * size
            for moved, size in ((query_norms, key_size), (key_norms, query_size))
        )
        spreads = query_size * key_size / root * (1 + 1e-12)
    else:
        shift = torch.einsum("hDd,hd->hD", weights.key, weights.query_bias).norm(dim=-1)
        query = product_norms(weights.key, weights.query) / root * (radius * radius)
        spreads = key = query + shift / root * (1 + 1e-12) * radius
    if norm == "tok":
        return join_heads(1 + query + key, weights, "ball R, tok (B5)")
    masses = key.new_tensor([row_mass(seq_len, mask, float(spread)) for spread in spreads])
    if norm == "sum":
        per_head = (masses.square() * (1 + 2 * key) + query) * (1 + 1e-12)
        # Heads may move different tokens, so the root of a sum of squares has no place here.
        apart = (weights.path_norms * per_head).sum() * (1 + 1e-12)
        return Bound(apart, "ball R, sum (B14), sum |V_h W_O,h| L_h")
    key_masses = masses.clamp_max(math.sqrt(seq_len / 2))
    per_head = join_heads(masses + query + key_masses * key, weights, "ball R, norm 2 (B5)")
    # The multi-head form of B5 in norm 2: every head sees the whole perturbation once.
    value = weights.value_norms
    query_all, key_all, value_all = (
        certified_spectral_norm(part.movedim(0, 1).flatten(1), method="cholesky")
        for part in (weights.query, weights.key, weights.value)
    )
    bracket = (
        masses.amax() * value_all
        + radius / root * (value * key_size).amax() * query_all
        + radius / root * key_masses.amax() * (value * query_size).amax() * key_all
    )
    together = Bound(weights.output_norm * bracket, "ball R, norm 2, heads together (B5)")
    return least([per_head, together])


@dataclass(frozen=True)
class HeadNorm:
    """LayerNorm on queries or keys: ``max |gamma|``, ``eps`` and the 2-norm of its bias."""

    gain: float
    eps: float
    shift: float = 0.0

    @classmethod
    def of(cls, module: nn.LayerNorm | None, head_dim: int, context: RuleContext) -> HeadNorm:
        """Read a LayerNorm over the head dimension, and no other norm."""
        form = (nn.LayerNorm, (head_dim,))
        shape = getattr(module, "normalized_shape", ())
        if module is None or (type(module), shape) != form or not module.eps > 0:
            raise Refused(
                f"its norms of queries and keys are not both LayerNorm({head_dim}) with eps > 0, for"
                f" which alone a bound is proved: one is {module}"
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


def on_the_ball(
    weights: AttentionWeights,
    context: RuleContext,
    bound: Callable[..., Bound] = dot_product_ball_bound,
    **options: Any,
) -> LayerBound:
    """Ask a bound of B5 in the context's norm."""
    if math.isinf(context.radius):
        return context.refuse_without_ball(_NO_GLOBAL_CONSTANT)
    asked = {"radius": context.radius, "seq_len": context.seq_len, "mask": context.mask}

    def found() -> LayerBound:
        out_radius = averaged_values_radius(weights, context.radius)
        in_any = partial(bound, weights, **asked, **options)
        return in_norm(in_any, context, weights.query.shape[1], out_radius)

    return context.remember(weights, f"ball, norm {context.norm}, {asked}", found)


@register_rule(DotProductAttention)
def _dot_product(module: DotProductAttention, context: RuleContext) -> LayerBound:
    refuse_dropout(module, module.dropout)
    weights = weights_of(module, context)
    if module.q_norm is None and module.k_norm is None:
        return on_the_ball(weights, context)
    parts = (module.q_norm, module.k_norm)
    query, key = (HeadNorm.of(norm, module.head_dim, context) for norm in parts)
    return on_the_ball(weights, context, qk_norm_ball_bound, query_norm=query, key_norm=key)


@register_rule(InverseDAttention)
def _inverse_d(module: InverseDAttention, context: RuleContext) -> LayerBound:
    """Weights as of dot-product attention: the queries carry ``1/sqrt d``, the output a third."""

    def scaled() -> AttentionWeights:
        weights = weights_of(module, context)
        query = weights.query * (math.sqrt(weights.head_dim) / module.head_dim)
        return replace(weights, query=query, output=weights.output / 3)

    return on_the_ball(context.remember(module, "inverse_d", scaled), context, rotary=True)


@register_rule(nn.MultiheadAttention)
def _multihead(module: nn.MultiheadAttention, context: RuleContext) -> LayerBound:
    """Self-attention ``x -> attention(x, x, x)``."""
    refuse_dropout(module, module.dropout)
    if not module.batch_first:
        return context.refuse(
            "its inputs are (tokens, batch, width), and a certificate speaks of (batch, tokens,"
            " width); set batch_first = True on it, which changes no weight, and call it with"
            " (batch, tokens, width)"
        )
    if module.in_proj_weight is None:
        return context.refuse(
            "its keys or values have a width of their own (kdim, vdim), so it is no self-attention"
        )
    if module.bias_k is not None or module.add_zero_attn:
        return context.refuse(
            "add_bias_kv and add_zero_attn put in a token of their own, for which no bound is"
            " proved"
        )

    def read() -> AttentionWeights:
        sizes = [module.embed_dim] * 3
        query, key, value = slices(module.in_proj_weight, module.in_proj_bias, sizes)
        head_dim = module.embed_dim // module.num_heads
        return AttentionWeights.of(query, key, value, module.out_proj, head_dim)

    weights = context.remember(module, "AttentionWeights", read)
    # A padded query attends to real tokens, so a pattern holds only where the caller says that
    # nothing is padded.
    return on_the_ball(weights, context)
