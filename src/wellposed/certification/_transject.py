"""TransJect: bounds of the whole map, and of distances between the tokens of one sequence (theory
note B8)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from wellposed.certification._rules import LayerBound, Site, refuse_deviations, register_rule
from wellposed.errors import NotLipschitzError
from wellposed.linalg import certified_spectral_norm
from wellposed.nn import (
    ExpertMixture,
    GramAttention,
    GramSpectrum,
    InjectiveResidual,
    LearnedSpectrum,
    OrthogonalFeedForward,
    TransJectBlock,
)
from wellposed.nn import TransJectStack as Stack

_PADDING = (
    "outputs of the stack at padded positions are left out: real tokens move sigma or gates, and"
    " these move the output of a padded token, however large it is"
)


_PARTS = (
    GramSpectrum, LearnedSpectrum, TransJectBlock, ExpertMixture, GramAttention, OrthogonalFeedForward,
    InjectiveResidual,
)  # fmt: skip


@torch.no_grad()
def token_distance_bounds(stack: Stack) -> list[tuple[float, float]]:
    """Return (lower, upper) after each layer with
    `lower |x_i - x_j| <= |x_i^l - x_j^l| <= upper |x_i - x_j|`.

    Certified for any two tokens of one sequence in eval mode (causal: of one sigma and gates), in
    exact arithmetic with
    these weights: `prod (1 -+ |r_l| |U||V|)(1 -+ |r_l| |W1||W2|)`, `r_l = alpha_l/L`, since given
    sigma and gates both go through the same map, whatever sigma and gates depend on. For orthogonal
    weights that is `prod (1 -+ |r_l|)^2`.
    Source: theory note B8, statement A; sharper than `e^6` of Sengupta et al. (2023), Theorem 2,
    and without `L >= 3`.

    Args:
        stack: from width d to itself.

    Returns:
        One pair for each layer. A lower bound of 0 says that injectivity is not certified.

    Raises:
        NotLipschitzError: hooks, adapters or patches make a call differ from the weights; all are
            named.

    Cost: a factorisation of each weight in float64.

    >>> from wellposed.nn import TransJectStack
    >>> stack = TransJectStack(8, 2, residual="sigmoid")
    >>> [(round(low, 3), round(high, 3)) for low, high in token_distance_bounds(stack)]
    [(0.562, 1.563), (0.316, 2.441)]
    """
    refuse_deviations(stack, "token_distance_bounds", Stack, *_PARTS)
    lower = upper = 1.0
    bounds: list[tuple[float, float]] = []
    for layer in stack.layers:
        parts = _constants(cast(TransJectBlock, layer), certified_spectral_norm, _largest(stack))
        for change in (
            parts.scale * parts.attention * parts.sigma,
            parts.scale * parts.feedforward,
        ):
            lower, upper = lower * max(0.0, 1 - change), upper * (1 + change)
        bounds.append((lower, upper))
    return bounds


@dataclass(frozen=True)
class _Constants:
    scale: float
    """`|alpha|/L`."""
    attention: float
    """`max_e |U_e||V_e|`."""
    feedforward: float
    sigma: float
    """Bound of `|sigma|`."""
    gate: float
    """`|w|` of gates that follow the input; 0 where they do not."""


@dataclass(frozen=True)
class _State:
    """`|X^l|_F <= growth |X^0|_F`; `|dX^l| <= frobenius |dX^0|_F` and, in norm tok,
    `<= tok |dX^0|_tok`."""

    growth: float = 1.0
    frobenius: float = 1.0
    tok: float = 1.0


def _constants(
    layer: TransJectBlock, size: Callable[[Tensor], Tensor | float], sigma: float
) -> _Constants:
    mixture, forward = layer.attention, layer.feedforward
    experts = [cast(GramAttention, expert) for expert in mixture.experts]
    follows = mixture.num_experts > 1 and mixture.gating != "fixed"
    return _Constants(
        scale=abs(layer.residual.coefficients()[1]),
        attention=max(
            float(size(expert.left.weight) * size(expert.right.weight)) for expert in experts
        ),
        feedforward=float(size(forward.up_proj.weight) * size(forward.down_proj.weight)),
        sigma=sigma,
        gate=float(mixture.gate.weight.double().norm()) * (1 + 1e-12) if follows else 0.0,
    )


def _largest(stack: Stack) -> float:
    spectrum = stack.spectrum
    return (
        float(spectrum.weight.double().tanh().abs().max())
        if isinstance(spectrum, LearnedSpectrum)
        else 1.0
    )


@register_rule(OrthogonalFeedForward)
def _feedforward(module: OrthogonalFeedForward, site: Site) -> LayerBound:
    if module.training and module.dropout > 0:
        return site.refuse(f"dropout {module.dropout} is active; call eval()")
    return site.chain([("up_proj", module.up_proj), ("down_proj", module.down_proj)])


@register_rule(Stack)
def _stack(module: Stack, site: Site) -> LayerBound:
    """The recursion of statement B, and of C where sigma and gates both follow the input; see
    `_after_attention`."""
    reason = _refusal(module, site)
    if reason is not None:
        return site.refuse(reason)
    for part in module.modules():
        site.reads(part, *_PARTS)
    spread = _spectrum_spread(module)
    tokens = math.sqrt(site.seq_len) if site.norm == "tok" else 1.0
    state = _State()
    for index, layer in enumerate(module.layers):
        parts = _constants(cast(TransJectBlock, layer), site.spectral_norm, _largest(module))
        before = _value(state, site)
        state = _after_feedforward(_after_attention(state, parts, spread, tokens), parts)
        ratio = _value(state, site) / before
        site.record(
            layer, f"layers.{index}", LayerBound(ratio, "layer's factor in the recursion of B8")
        )
    # Sigma and gates do not see a padded token, which may be any size.
    if _follows_input(module) and _PADDING not in site.walk.notes:
        site.walk.notes.append(_PADDING)
    form = _form(module, spread)
    return LayerBound(_value(state, site) * (1 + 1e-9), form, out_radius=state.growth * site.radius)


def _follows_input(module: Stack) -> bool:
    """Whether sigma, or the gates of some layer, are computed from the tokens."""
    mixtures = [cast(TransJectBlock, layer).attention for layer in module.layers]
    return not isinstance(module.spectrum, LearnedSpectrum) or any(
        mixture.num_experts > 1 and mixture.gating != "fixed" for mixture in mixtures
    )


def _refusal(module: Stack, site: Site) -> str | None:
    layers = [cast(TransJectBlock, layer) for layer in module.layers]
    mixtures = [layer.attention for layer in layers]
    if any(mixture.num_experts > 1 and mixture.gating == "pooled" for mixture in mixtures):
        return (
            "pooled gates have no Lipschitz constant: their change multiplies expert outputs of any"
            " size; build the stack with gating='normalized' or 'fixed', or one expert (distances"
            " within a sequence are bounded all the same, see"
            " wellposed.certification.token_distance_bounds)"
        )
    if module.training and any(layer.feedforward.dropout > 0 for layer in layers):
        return "dropout is active; call eval()"
    if site.norm == "inf":
        return "orthogonal maps are bounded in norms 2 and tok, not in inf; certify in norm 'tok'"
    if module.is_causal and _follows_input(module):
        return (
            "no bound is proved for a causal spectrum or causal gates, which differ from token to"
            " token"
        )
    return None


def _spectrum_spread(module: Stack) -> float:
    """Return k with `|X^0|_F |d sigma|_inf <= k |dX^0|_F`: 0 learnt, 1 by the trace, `2 sqrt(2d)`
    by the maximum.

    An inexact basis multiplies it by its condition number: `g = |X u|^2` is exact in `Z = X U0`.
    """
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
            " U0 - I|_2); expected below 1; hold it with constrain_(model, optimizer,"
            " where='*.basis')"
        )
    condition = math.sqrt((1 + defect) / (1 - defect))
    return condition * (
        1.0 if spectrum.normalization == "trace" else 2 * math.sqrt(2 * module.embed_dim)
    )


def _after_attention(state: _State, parts: _Constants, spread: float, tokens: float) -> _State:
    """`x + r sum_e lambda_e F_e(x, sigma)`.

    With `b = |U||V|`, `s >= |sigma|`: `|dF_e| <= b (s |dX| + |X||d sigma|)`, `|X||d sigma| <= k A`.
    Logits `w . pool(X_e) / sqrt(eps + |X|^2)` move by
    `|w| (2 (1 + r b s)|dX| + r b |X||d sigma|) / |X|` and softmax gates by no more, summed (L5);
    that times `|F_e| <= b s |X|`. In norm tok the terms that all tokens share pay sqrt N.
    """
    step = parts.scale * parts.attention * parts.sigma
    moved = parts.scale * parts.attention * spread * state.growth
    gates = step * parts.gate * (2 * (1 + step) * state.frobenius + moved)
    return _State(
        growth=state.growth * (1 + step),
        frobenius=state.frobenius * (1 + step) + moved + gates,
        tok=state.tok * (1 + step) + tokens * (moved + gates),
    )


def _after_feedforward(state: _State, parts: _Constants) -> _State:
    factor = 1 + parts.scale * parts.feedforward
    return _State(state.growth * factor, state.frobenius * factor, state.tok * factor)


def _value(state: _State, site: Site) -> float:
    return state.tok if site.norm == "tok" else state.frobenius


def _form(module: Stack, spread: float) -> str:
    if not spread:
        return "fixed sigma (B8)"
    kind = cast(GramSpectrum, module.spectrum).normalization
    return f"sigma by the {kind} (B8)" + (", which grows like sqrt d" if kind == "max" else "")
