"""L2 self-attention: the rule, and kim2021's printed bounds, kept to be compared against (theory note B1 to B4)."""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from wellposed.certification._rules import LayerBound, Site, register_rule
from wellposed.errors import WellposedError
from wellposed.linalg import (
    certified_spectral_norm,
    infinity_norm,
    kim_bracket,
    l2_constants,
)
from wellposed.nn import L2SelfAttention


def kim2021_bound(
    projection: Tensor,
    value: Tensor,
    output: Tensor,
    *,
    seq_len: int,
    norm: Literal["inf", 2],
    as_printed: bool = False,
) -> Tensor:
    """Return Theorem 3.2 of Kim, Papamakarios, Mnih (2021) for tied L2 attention with ``A_h = W_h W_h^T / sqrt d``.

    ``inf``: ``(4c + 1/sqrt d) max|W_h|_inf |W_h^T|_inf max|W_V,h^T|_inf |W_O^T|_inf``, certified.
    ``2``: ``sqrt(N/d) (4c + 1) sqrt(sum |W_h|^4 |W_V,h|^2) |W_O|``, certified. With ``as_printed`` the fourth power is
    the second, as in the paper: that is a slip, and **no upper bound** (the map is quadratic in ``W_h``).

    Args:
        projection, value: ``W_h`` and ``W_V,h``, ``(H, D, d)``.
        output: ``W_O``, ``(H d, E)``.
        seq_len: number of tokens N.

    Returns:
        0-dim float64 tensor. `wellposed.linalg.l2_attention_bound` is never larger; use that.

    >>> import torch
    >>> one, ten = torch.ones(1, 1, 1), torch.full((1, 1, 1), 10.0)
    >>> round(float(kim2021_bound(ten, one, one[0], seq_len=2, norm=2)), 2)
    298.95
    >>> round(float(kim2021_bound(ten, one, one[0], seq_len=2, norm=2, as_printed=True)), 2)
    29.89
    """
    bracket = kim_bracket(seq_len, norm=norm, head_dim=projection.shape[-1])
    if norm == "inf":
        square = infinity_norm(projection) * infinity_norm(projection.mT)
        return bracket * square.amax() * infinity_norm(value.mT).amax() * infinity_norm(output.mT)
    power = 2 if as_printed else 4
    spectral, values = certified_spectral_norm(projection), certified_spectral_norm(value)
    return bracket * (spectral.pow(power) * values.square()).sum().sqrt() * certified_spectral_norm(output)


def kim2021_mixing(projection: Tensor, value: Tensor) -> Tensor:
    """Return ``R_h = W_h^T W_V,h / sqrt d``, the paper's value map in terms of ``z = x W_h``: ``(H, d, d)``.

    >>> import torch
    >>> kim2021_mixing(torch.eye(4).reshape(1, 4, 4), torch.eye(4).reshape(1, 4, 4))[0, 0, 0]
    tensor(0.5000)
    """
    return projection.mT @ value / math.sqrt(projection.shape[-1])


@register_rule(L2SelfAttention)
def _l2_self_attention(module: L2SelfAttention, site: Site) -> LayerBound:
    reason = module.certificate_refusal()
    if reason is not None:
        return site.refuse(f"L2 attention of this form, with these weights, has no Lipschitz constant: {reason}")
    if module.contractive is not None:
        return _contractive(module, site)
    constants = l2_constants(site.seq_len, mask=site.mask)
    layer = site.remember(module, "L2Layer", lambda: module.bound_layers("cholesky")[1])
    bound = layer.bound(constants, norm=site.norm)
    # sum_h |W_h| |C_h|: averages of x W_h stay within |W_h| R, and equal tokens pass a constant through.
    spread = layer.bound(l2_constants(1), per_head_only=True).value
    radius = math.inf if math.isinf(site.radius) else float(spread) * site.radius + _at_zero(module, 1)
    return LayerBound(float(bound.value), bound.form, out_radius=radius)


def _contractive(module: L2SelfAttention, site: Site) -> LayerBound:
    # A layer with a weight of zeros is not scaled up to its constant: its bound is 0.
    full = all(bool(weight.any()) for weight in module.parameters() if weight.ndim > 1)
    if full and (module.norm, module.max_tokens) == (site.norm, site.seq_len):
        return _contraction(module, site, float(module.contractive or math.inf))
    try:
        layers = site.remember(module, "bound_layers", lambda: module.bound_layers("cholesky"))
        value = float(module.lipschitz_bound(site.seq_len, norm=site.norm, mask=site.mask, layers=layers))
    except WellposedError as error:
        return site.refuse(str(error))
    return _contraction(module, site, value)


def _contraction(module: L2SelfAttention, site: Site, value: float) -> LayerBound:
    # Being value-Lipschitz in tok, the output cannot leave the ball around its value at 0.
    bounded = site.norm == "tok" and math.isfinite(site.radius)
    radius = value * site.radius + _at_zero(module, site.seq_len) if bounded else math.inf
    return LayerBound(value, f"divided by its bound in norm {module.norm}", out_radius=radius)


def _at_zero(module: L2SelfAttention, seq_len: int) -> float:
    """Largest token of the output for zero inputs, whose tokens are all alike, at any number of tokens up to this.

    The scale of a contractive layer shrinks with the number of tokens, and the output is affine in it: the ends decide.
    """
    return max(float(module.at_zero(count).norm()) for count in {1, seq_len}) * (1 + 1e-6)
