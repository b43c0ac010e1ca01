"""Rules of attention with a global constant: L2 (theory notes B1 to B4), cosine (B6), ball (B12)."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from wellposed.certification._layer_bound import LayerBound, Refused, times
from wellposed.certification._rules_by_class import register_rule
from wellposed.certification._walk import RuleContext
from wellposed.certification.rules._attention_weights import (
    TRY_ALL_BELOW,
    AttentionWeights,
    cut_into_heads,
    weights_of,
)
from wellposed.certification.rules._cosine_weights import CosineWeights
from wellposed.certification.rules._dot_product import (
    in_norm,
    on_the_ball,
    refuse_dropout,
    row_mass,
)
from wellposed.certification.rules._near import cosine_near, nearer
from wellposed.errors import ConfigError, WellposedError
from wellposed.linalg import (
    Bound,
    HeadMaps,
    L2Layer,
    MaskKind,
    Norm,
    check_norm,
    l2_constants,
    smallest_bound,
)
from wellposed.nn import BallAttention, CosineSelfAttention, L2SelfAttention, project_to_ball

Layers = tuple[L2Layer, L2Layer]


@register_rule(L2SelfAttention)
def _l2_self_attention(module: L2SelfAttention, context: RuleContext) -> LayerBound:
    layers: Layers | None = None
    if module.contractive is not None:
        layers = context.remember(module, "bound_layers", lambda: module.bound_layers("cholesky"))

    reason = module.certificate_refusal(layers)
    if reason is not None:
        return context.refuse(
            f"L2 attention of this form, with these weights, has no Lipschitz constant: {reason}"
        )
    if layers is not None:
        return _contractive(module, context, layers)

    constants = l2_constants(context.seq_len, mask=context.mask)
    layer = context.remember(module, "L2Layer", lambda: module.bound_layers("cholesky")[1])
    bound = layer.bound(constants, norm=check_norm(context.norm))
    # sum_h |W_h| |C_h|: averages of x W_h stay within |W_h| R; equal tokens add a constant.
    spread = layer.bound(l2_constants(1), per_head_only=True).value
    radius = times(float(spread), context.radius) + _at_zero(module, 1, None)
    return LayerBound(float(bound.value), bound.form, out_radius=radius, fresh=True)


def _contractive(module: L2SelfAttention, context: RuleContext, layers: Layers) -> LayerBound:
    # A layer with an all-zero weight is not scaled up to its constant: its bound is 0.
    full = all(bool(weight.any()) for weight in module.parameters() if weight.ndim > 1)
    sharp = module.bound == "sharp"
    # In tok a bound below the divisor is proved (B24); in other norms both are the same.
    same = (module.norm, module.max_tokens) == (context.norm, context.seq_len)
    if full and sharp and same and context.norm != "tok":
        value = float(module.contractive or math.inf)
    else:
        asked = {"norm": check_norm(context.norm), "mask": context.mask, "layers": layers}
        try:
            value = float(module.lipschitz_bound(context.seq_len, **asked))
        except WellposedError as error:
            return context.refuse(str(error))

    # The layer is Lipschitz in tok, so outputs stay in a ball around its value at 0.
    bounded = context.norm == "tok" and math.isfinite(context.radius)
    radius = (
        value * context.radius + _at_zero(module, context.seq_len, layers) if bounded else math.inf
    )
    form = f"divided by its bound in norm {module.norm}"
    return LayerBound(value, form, out_radius=radius, fresh=True)


def _at_zero(module: L2SelfAttention, seq_len: int, layers: Layers | None) -> float:
    """Return the largest output for zero inputs; it is affine in the scale, so the ends decide."""
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
    """Return ``L >= Lip(nu softmax(tau n(x W_Q) . n(x W_K)) n(x W_V) W_O)``, ``n(a) = a/sqrt(|a|^2
    + eps)``.

    Status: certified on the whole space, for any mask without empty rows and any biases inside
    ``n``.
    Source: theory note B6, after Qi et al. (2023), LipsFormer.

    Args:
        query: ``(H, D, d)``, row convention ``x @ W_h``.
        key: As `query`.
        value: As `query`.
        output: ``W_O,h``, ``(H, d, E)``.
        eps: Of the normalisation, > 0.
        temperature: One tau, or one per head.
        value_scale: One nu, or one per head.
        seq_len: Largest number of tokens; affects norm 2 only.
        norm: ``"tok"``, ``"inf"`` or ``2``.
        mask: Sharpens norm 2.
        output_norm: An upper bound of ``|W_O|``, if known.

    Returns:
        `wellposed.linalg.Bound`, value in float64.

    Raises:
        ConfigError: ``eps <= 0`` (then there is no bound), or an unknown norm.

    >>> w = torch.eye(2).reshape(1, 2, 2)
    >>> round(float(cosine_attention_bound(w, w, w, w, eps=1.0, temperature=1.0, seq_len=9).value), 3)
    1.414
    """
    check_norm(norm)
    if not eps > 0:
        raise ConfigError(
            f"cosine attention has a Lipschitz bound only for eps > 0, received eps={eps}"
        )
    weights = CosineWeights(query, key, value, HeadMaps(output), eps, temperature, value_scale)
    bound = _cosine_bound(weights, seq_len=seq_len, norm=norm, mask=mask)
    if output_norm is None or norm == 2:
        return bound
    width = math.sqrt(query.shape[1]) if norm == "inf" else 1.0
    with_output = output_norm * weights.per_token().square().sum().sqrt() * width * (1 + 1e-12)
    return smallest_bound([bound, Bound(with_output, f"|W_O| sqrt(sum L_h^2), {norm} (B6)")])


def _cosine_bound(weights: CosineWeights, *, seq_len: int, norm: Norm, mask: MaskKind) -> Bound:
    balance = weights.query.shape[1] <= TRY_ALL_BELOW
    if norm == 2:
        mass = row_mass(seq_len, mask, float(weights.tau.max()))
        per_head = weights.per_row(mass, min(mass, math.sqrt(seq_len / 2)))
        apart = Bound(weights.outputs.joined(per_head, balance=balance), "heads joined, 2 (B6)")
        return smallest_bound([apart, weights.all_heads(mass)])
    joined = weights.outputs.joined(weights.per_token(), balance=balance)
    best = Bound(joined, "heads joined, tok (B6)")
    if norm != "inf":
        return best
    return Bound(best.value * math.sqrt(weights.query.shape[1]), f"sqrt(D) x ({best.form})")


@register_rule(CosineSelfAttention)
def _cosine_self_attention(module: CosineSelfAttention, context: RuleContext) -> LayerBound:
    refuse_dropout(module, module.dropout)
    weights = weights_of(module, context)
    # Rounding in the module's dtype may raise the exponential by a unit in the last place.
    tau = module.log_tau.detach().double().exp() * (1 + 2 * torch.finfo(module.log_tau.dtype).eps)
    if not bool(tau.isfinite().all()):
        raise Refused(
            f"a temperature exp(log_tau) is infinite, as log_tau reaches {float(module.log_tau.max()):g};"
            " lower log_tau"
        )
    nu = module.nu.detach().double().expand(len(weights.output))
    cosine = CosineWeights(
        query=weights.query,
        key=weights.key,
        value=weights.value,
        outputs=weights.outputs,
        eps=module.eps,
        temperature=tau,
        value_scale=nu,
    )
    bound = partial(_cosine_bound, cosine, seq_len=context.seq_len, mask=context.mask)
    # Each head's output is an average of vectors shorter than nu, for any input.
    spread = weights.outputs.joined(nu.abs(), balance=weights.is_small)
    out_radius = float(spread + weights.output_bias.norm())
    everywhere = in_norm(bound, context, module.embed_dim, out_radius)
    centre = context.centre_of(module)
    if centre is None:
        return everywhere

    near = cosine_near(cosine, weights, centre, context.moved)
    if not float(near.value) < everywhere.lipschitz:
        return everywhere
    return replace(everywhere, lipschitz=float(near.value), form=near.form)


@register_rule(BallAttention, sums=True)
def _ball_attention(module: BallAttention, context: RuleContext) -> LayerBound:
    weights = context.remember(module, "ball_weights", lambda: _ball_weights(module))
    bound = on_the_ball(weights, context.at_radius(min(1.0, context.radius)))
    centre = context.centre_of(module)
    if centre is not None:
        centre = replace(centre, tokens=project_to_ball(centre.tokens))
    return nearer(bound, weights, centre, context)


def _ball_weights(module: BallAttention) -> AttentionWeights:
    """Return dot-product weights: queries include ``t sqrt d``, outputs ``w`` of their head."""
    weights = cut_into_heads(module)
    dtype = module.mix_logit.dtype
    # Both scales are computed in float32 at least and rounded once.
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
