"""Rules of convolutions (theory note B20), in norms 2 and inf."""

from __future__ import annotations

import math

from torch import nn

from wellposed.certification._layer_bound import LayerBound
from wellposed.certification._rules_by_class import register_rule
from wellposed.certification._walk import RuleContext
from wellposed.certification.bounds import convolution_norm

Convolution = nn.Conv1d | nn.Conv2d


def _padding(module: Convolution) -> list[tuple[int, int]]:
    """Return the padding before and after, for each dimension."""
    flat = module._reversed_padding_repeated_twice
    return [(flat[index], flat[index + 1]) for index in range(len(flat) - 2, -1, -2)]


@register_rule(nn.Conv1d)
@register_rule(nn.Conv2d)
def _convolution(module: Convolution, context: RuleContext) -> LayerBound:
    if context.norm not in (2, "inf"):
        return context.refuse(
            f"a convolution mixes the rows that norm {context.norm} reads as tokens; certify in"
            " norm=2 (all entries) or 'inf' (the largest entry)"
        )

    weight = module.weight
    if context.norm == "inf":
        # Padding of every mode copies entries or adds zeros.
        sums = weight.detach().double().abs().sum(tuple(range(1, weight.ndim)))
        bound = float(sums.max()) * (1 + 1e-12 * math.sqrt(weight[0].numel()))
        return LayerBound(bound, "largest absolute sum of a filter", fresh=True)

    mode = module.padding_mode
    if mode not in ("zeros", "circular"):
        return context.refuse(
            f"padding_mode={mode!r} repeats entries, so the norm depends on the length and no bound"
            " is proved; use 'zeros' or 'circular', or certify in norm='inf'"
        )

    reach = (
        taps * (size - 1) for taps, size in zip(module.dilation, module.kernel_size, strict=True)
    )
    padding = [left + right for left, right in _padding(module)]
    if mode == "circular" and any(
        added > needed for added, needed in zip(padding, reach, strict=True)
    ):
        return context.refuse(
            "its circular padding wraps outputs around more than once, so some count twice; use"
            " padding='same'"
        )

    stride = tuple(module.stride)
    form = "all frequencies (B20)"
    if mode == "circular" and max(stride) > 1:
        # Of a circle that the stride need not divide, some outputs of stride 1 remain.
        stride = (1,) * len(stride)
        form = "all frequencies (B20), as with stride 1"
    elif max(stride) > 1 and max(module.dilation) > 1:
        stride = (1,) * len(stride)
        form = "all frequencies (B20), as with stride 1"

    bound = context.remember(
        weight,
        ("convolution", stride, module.groups),
        lambda: convolution_norm(weight, stride=stride, groups=module.groups),
    )
    return LayerBound(bound, form, fresh=True)
