"""Gated feed-forwards ``x -> W_d (g(W_g x) * W_u x)``, as SwiGLU and GEGLU, on balls (note B23)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.certification._curves import curve_of
from wellposed.certification._layer_bound import LayerBound, times
from wellposed.certification._rules_by_class import register_by_name
from wellposed.certification._walk import RuleContext
from wellposed.certification.bounds import NO_BOUND, Link, Matrix, Slopes

Ends = tuple[Tensor, Tensor]
_SLACK = 1 + 1e-9
_FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "gemma": "Gemma"}


@dataclass(frozen=True)
class _Gated:
    """A gated feed-forward, and between which numbers its hidden entries lie on the ball."""

    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    slopes: Ends
    """Of the gate."""
    values: Ends
    """Of the gate."""
    factors: Ends
    """The numbers that the gate multiplies."""

    def links(self) -> tuple[Link, ...]:
        """Return the map of differences as one of twice the hidden units: ``d(g(a) u) = (g'(a) u)
        da + g(a) du``."""
        steep = _product(self.slopes, self.factors)
        low, high = (torch.cat(pair) for pair in zip(steep, self.values, strict=True))
        first = torch.cat((self.gate.weight, self.up.weight)).detach()
        last = torch.cat((self.down.weight, self.down.weight), dim=1).detach()
        return Matrix(first), Slopes(low, high), Matrix(last)

    def product(self, context: RuleContext) -> float:
        """Return the product of norms (B13)."""
        of_gate = times(
            _largest(_product(self.slopes, self.factors)), context.operator_norm(self.gate.weight)
        )
        of_up = times(_largest(self.values), context.operator_norm(self.up.weight))
        return times(context.operator_norm(self.down.weight), of_gate + of_up) * _SLACK

    def size(self, context: RuleContext) -> float:
        """Bound the 2-norm of outputs."""
        low, high = _product(self.values, self.factors)
        hidden = float(torch.maximum(low.abs(), high.abs()).norm()) * _SLACK
        bias = self.down.bias
        shift = 0.0 if bias is None else float(bias.detach().double().norm())
        return times(context.spectral_norm(self.down.weight), hidden) + shift


def _gated(module: Any, context: RuleContext) -> LayerBound:
    curve = curve_of(module.act_fn)
    if curve is None:
        return context.refuse(
            f"values and slopes of its gate {type(module.act_fn).__name__} are not known on an interval;"
            " use SiLU or GELU"
        )

    context.reads(module.act_fn)
    if math.isinf(context.radius):
        return context.refuse_without_ball(
            "a gate multiplies two maps, so it has no global Lipschitz constant"
        )

    reached = _reached(module.gate_proj, module, context)
    parts = _Gated(
        module.gate_proj,
        module.up_proj,
        module.down_proj,
        slopes=curve.slopes(*reached),
        values=curve.values(*reached),
        factors=_reached(module.up_proj, module, context),
    )
    near = context.centre_of(module) is not None
    form = f"gated feed-forward, {'around the inputs' if near else 'ball R'} (B23)"
    size = parts.size(context)
    links = parts.links()
    bound = LayerBound(parts.product(context), form, out_radius=size, fresh=True, links=links)
    tight = NO_BOUND if context.is_branch else context.tightest(links)
    if not tight.value < bound.lipschitz:
        return bound

    return replace(bound, lipschitz=tight.value, form=f"{form}, {tight.form}")


def _largest(ends: Ends) -> float:
    return float(torch.maximum(ends[0].abs(), ends[1].abs()).max())


def _reached(layer: nn.Linear, owner: nn.Module, context: RuleContext) -> Ends:
    """Return between which numbers each output of a linear map lies, for all tokens of the ball."""
    weight = layer.weight.detach().to("cpu", torch.float64)
    bias = weight.new_zeros(len(weight))
    if layer.bias is not None:
        bias = layer.bias.detach().to("cpu", torch.float64)

    rows = weight.norm(dim=-1) * _SLACK
    reach = rows * context.radius
    low = bias - reach
    high = bias + reach
    centre = context.centre_of(owner)
    if centre is not None:
        outputs = centre.tokens.cpu().flatten(0, -2) @ weight.mT + bias
        moved = rows * centre.reach(context.moved)
        low = low.maximum(outputs.amin(0) - moved)
        high = high.minimum(outputs.amax(0) + moved)
    margin = 1e-9 * (low.abs() + high.abs())

    return low - margin, high + margin


def _product(first: Ends, second: Ends) -> Ends:
    """Return the interval of products of numbers of two intervals."""
    ends = torch.stack([one * other for one in first for other in second])
    margin = 1e-12 * ends.abs().amax(0)
    return ends.amin(0) - margin, ends.amax(0) + margin


for _family, _prefix in _FAMILIES.items():
    register_by_name(
        f"transformers.models.{_family}.modeling_{_family}.{_prefix}MLP", _gated, sums=True
    )
