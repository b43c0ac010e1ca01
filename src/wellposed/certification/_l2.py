"""L2 self-attention: the rule (theory note B1 to B4)."""

from __future__ import annotations

import math

from wellposed.certification._rules import LayerBound, Site, register_rule
from wellposed.errors import WellposedError
from wellposed.linalg import L2Layer, check_norm, l2_constants
from wellposed.nn import L2SelfAttention

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
    radius = (
        math.inf
        if math.isinf(site.radius)
        else float(spread) * site.radius + _at_zero(module, 1, None)
    )
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
