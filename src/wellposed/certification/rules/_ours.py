"""Rules of our own layers: maps of each token, and TransJect (theory note B8)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from wellposed.certification._layer_bound import LayerBound, times
from wellposed.certification._rules_by_class import register_rule
from wellposed.certification._walk import RuleContext
from wellposed.certification.bounds import Slopes, SortedPairs
from wellposed.certification.rules._torch_layers import function_bound, identity, linear, norm
from wellposed.errors import NotLipschitzError
from wellposed.linalg import certified_spectral_norm
from wellposed.nn import (
    MLP,
    BallCrossAttention,
    BallEmbedding,
    BallProjection,
    CosineCrossAttention,
    DecoderBlock,
    DrawnSpectrum,
    DynamicErf,
    DynamicTanh,
    ExpertMixture,
    GramAttention,
    GramSpectrum,
    InjectiveResidual,
    LearnedSpectrum,
    MaxMin,
    MaxMinFeedForward,
    OrthogonalFeedForward,
    OrthogonalLinear,
    PostNorm,
    PreNorm,
    RemovedNorm,
    TransJectBlock,
    UnitEmbedding,
)
from wellposed.nn import TransJectStack as Stack

register_rule(OrthogonalLinear, sums=True)(linear)
register_rule(RemovedNorm, sums=True)(identity)
register_rule(PreNorm)(norm)
register_rule(PostNorm)(norm)


@register_rule(CosineCrossAttention)
@register_rule(BallCrossAttention)
@register_rule(DecoderBlock)
def _cross_attention(_module: nn.Module, context: RuleContext) -> LayerBound:
    return context.refuse("it maps two sequences, and a certificate is of one; certify the encoder")


@register_rule(UnitEmbedding)
@register_rule(BallEmbedding)
def _embedding(_module: nn.Module, context: RuleContext) -> LayerBound:
    return context.refuse(
        "it maps token ids, which have no Lipschitz constant; certify what follows it with radius=1:"
        " token vectors have norm at most 1, so replacing a word moves one token by at most 2"
    )


@register_rule(DynamicTanh, sums=True)
def _dynamic_tanh(module: DynamicTanh, context: RuleContext) -> LayerBound:
    """Bound each entry by its slope ``|gamma_i alpha|`` at 0, the largest, in every norm."""
    gamma, alpha, beta = (
        part.detach().double() for part in (module.weight, module.alpha, module.bias)
    )
    slope = float(gamma.abs().max() * alpha.abs())
    radius = min(times(slope, context.radius), float(gamma.norm())) + float(beta.norm())
    radius *= 1 + 1e-6
    steep = gamma * alpha
    links = (Slopes(steep.clamp_max(0) * (1 + 1e-15), steep.clamp_min(0) * (1 + 1e-15)),)
    form = "max|gamma alpha|"
    return LayerBound(slope, form, "exact", out_radius=radius, fresh=True, links=links)


@register_rule(DynamicErf, sums=True)
def _dynamic_erf(module: DynamicErf, context: RuleContext) -> LayerBound:
    """Bound each entry by its slope ``2 / sqrt(pi) |gamma_i alpha|``, the largest, in every norm."""
    gamma, alpha, beta, shift = (
        part.detach().double() for part in (module.weight, module.alpha, module.bias, module.shift)
    )
    slope = float(gamma.abs().max() * alpha.abs()) * 2.0 / math.sqrt(math.pi)
    at_zero = float((gamma * torch.erf(shift)).norm())
    radius = min(times(slope, context.radius) + at_zero, float(gamma.norm())) + float(beta.norm())
    radius *= 1 + 1e-6
    slope *= 1 + 1e-12
    form = "2/sqrt(pi) max|gamma alpha|"
    return LayerBound(slope, form, "exact", out_radius=radius, fresh=True)


@register_rule(MLP, sums=True)
def _mlp(module: MLP, context: RuleContext) -> LayerBound:
    up = context.child(module.up_proj, "up_proj")
    inner = function_bound(module.activation, context.after(up))
    down = context.after(up).after(inner).child(module.down_proj, "down_proj")
    return context.product([up, inner, down])


@register_rule(BallProjection, sums=True)
def _ball_projection(module: BallProjection, context: RuleContext) -> LayerBound:
    if context.radius <= module.radius:
        form = "identity inside the ball"
        return LayerBound(1.0, form, "exact", out_radius=context.radius, skip=1.0)
    factor = (1 + math.sqrt(module.embed_dim)) / 2 if context.norm == "inf" else 1.0
    return LayerBound(factor, "projection onto a ball", "exact", out_radius=module.radius)


@register_rule(MaxMin, sums=True)
def _maxmin(_module: MaxMin, context: RuleContext) -> LayerBound:
    form = "a permutation almost everywhere"
    links = (SortedPairs(),)
    return LayerBound(1.0, form, "exact", out_radius=context.radius, fresh=True, links=links)


@register_rule(MaxMinFeedForward, sums=True)
def _maxmin_feedforward(module: MaxMinFeedForward, context: RuleContext) -> LayerBound:
    return context.chain_of(module, "up_proj activation down_proj")


_PADDING = (
    "outputs of the stack at padded positions are not covered: real tokens move sigma or gates,"
    " which move padded tokens of any size"
)


_TWO_MAPS = (
    "its sigma is drawn anew in each pass, so two passes are two maps; build the stack with"
    " spectrum='random', whose sigma is learnt"
)
_PARTS = (
    GramSpectrum, LearnedSpectrum, TransJectBlock, ExpertMixture, GramAttention, OrthogonalFeedForward,
    InjectiveResidual,
)  # fmt: skip


def _slopes(layer: TransJectBlock, size: Callable[[Tensor], float]) -> tuple[float, float]:
    """Return ``|r| max_e |U_e||V_e|`` and ``|r| |W1||W2|``, ``r = alpha/L``."""
    experts = [cast(GramAttention, expert) for expert in layer.attention.experts]
    maps = [(expert.left, expert.right) for expert in experts]
    maps.append((layer.feedforward.up_proj, layer.feedforward.down_proj))
    scale = abs(layer.residual.coefficients()[1])
    *mixed, fed = (scale * float(size(one.weight) * size(two.weight)) for one, two in maps)
    return max(mixed), fed


def _largest_sigma(stack: Stack) -> float:
    spectrum = stack.spectrum
    if isinstance(spectrum, LearnedSpectrum):
        return float(spectrum.weight.double().tanh().abs().max())
    return 1.0


@register_rule(OrthogonalFeedForward)
def _feedforward(module: OrthogonalFeedForward, context: RuleContext) -> LayerBound:
    if module.training and module.dropout > 0:
        return context.refuse(f"dropout {module.dropout} is active; call eval()")
    return context.chain_of(module, "up_proj down_proj")


@register_rule(Stack)
def _stack(module: Stack, context: RuleContext) -> LayerBound:
    """Follow the recursion of statement B, and of C if sigma and gates depend on the input (B8)."""
    drawn = isinstance(module.spectrum, DrawnSpectrum)
    reason = _TWO_MAPS if drawn else _refusal(module, context)
    if reason is not None:
        return context.refuse(reason)

    for part in module.modules():
        context.reads(part, *_PARTS)
    spread = _spectrum_spread(module)
    sigma = _largest_sigma(module)
    tokens = math.sqrt(context.seq_len) if context.norm == "tok" else 1.0
    growth = frobenius = value = 1.0
    for index, block in enumerate(module.layers):
        layer = cast(TransJectBlock, block)
        attention, feedforward = _slopes(layer, context.spectral_norm)
        step = attention * sigma
        moved = attention * spread * growth
        gates = step * _gate_norm(layer.attention) * (2 * (1 + step) * frobenius + moved)
        before = value
        fed = 1 + feedforward
        value = (value * (1 + step) + tokens * (moved + gates)) * fed
        frobenius = (frobenius * (1 + step) + moved + gates) * fed
        growth *= (1 + step) * fed
        bound = LayerBound(value / before, "layer's factor in the recursion of B8")
        context.record(layer, f"layers.{index}", bound)

    # Sigma and gates ignore padded tokens, which may have any size.
    if _follows_input(module) and _PADDING not in context.builder.notes:
        context.builder.notes.append(_PADDING)
    form = "fixed sigma (B8)"
    if isinstance(module.spectrum, GramSpectrum):
        kind = module.spectrum.normalization
        grows = ", which grows like sqrt d" if kind == "max" else ""
        form = f"sigma by the {kind} (B8){grows}"
    radius = math.inf if _has_bias(module) else growth * context.radius

    return LayerBound(value * (1 + 1e-9), form, out_radius=radius)


def _has_bias(module: Stack) -> bool:
    """Return whether a feed-forward has biases: then a small input may have a large output."""
    maps = (part for part in module.modules() if isinstance(part, OrthogonalLinear))
    return any(part.bias is not None for part in maps)


def _gate_norm(mixture: ExpertMixture) -> float:
    """Return ``|w|`` of gates that follow the input, or 0."""
    if mixture.num_experts == 1:
        return 0.0
    return float(mixture.gate.weight.double().norm()) * (1 + 1e-12)


def _gatings(module: Stack) -> set[str]:
    """Return how layers with several experts mix them."""
    mixtures = (cast(TransJectBlock, layer).attention for layer in module.layers)
    return {mixture.gating for mixture in mixtures if mixture.num_experts > 1}


def _follows_input(module: Stack) -> bool:
    """Return whether sigma, or the gates of some layer, are computed from the tokens."""
    return not isinstance(module.spectrum, LearnedSpectrum) or bool(_gatings(module))


def _refusal(module: Stack, context: RuleContext) -> str | None:
    if "pooled" in _gatings(module):
        return (
            "pooled gates have no Lipschitz constant, since their change multiplies unbounded expert"
            " outputs; build the stack with gating='normalized', or one expert"
        )

    fed = [cast(TransJectBlock, layer).feedforward for layer in module.layers]
    if any(part.training and part.dropout > 0 for part in fed):
        return "dropout is active; call eval()"
    if context.norm == "inf":
        return "orthogonal maps are bounded in norms 2 and tok, not in inf; certify in norm 'tok'"
    if module.is_causal and _follows_input(module):
        return "no bound is proved for a causal spectrum or causal gates, which differ by token"
    if _has_bias(module) and _follows_input(module):
        return "feedforward_bias has a bound with spectrum='random' and one expert alone"

    return None


def _spectrum_spread(module: Stack) -> float:
    """Return k with ``|X^0|_F |d sigma|_inf <= k |dX^0|_F`` (B8, with an inexact basis)."""
    spectrum = module.spectrum
    if not isinstance(spectrum, GramSpectrum):
        return 0.0

    basis = spectrum.basis.weight.detach().double()
    defect = float(
        certified_spectral_norm(basis.mT @ basis - torch.eye(len(basis), dtype=basis.dtype))
    )
    if defect >= 1:
        raise NotLipschitzError(
            f"certify: the basis of the Gram spectrum is off orthogonality by {defect:.3g} (|U0^T"
            " U0 - I|_2), expected below 1; constrain it: constrain_(model, optimizer,"
            " where='*.basis')"
        )

    condition = math.sqrt((1 + defect) / (1 - defect))
    by_trace = spectrum.normalization == "trace"
    return condition * (1.0 if by_trace else 2 * math.sqrt(2 * module.embed_dim))
