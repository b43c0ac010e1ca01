"""Rules for the invertible blocks: ``x + f(x)``, additive couplings and stacks of them (theory note
B9)."""

from __future__ import annotations

import math

from wellposed.certification._as_called import first_deviation
from wellposed.certification._rules import (
    LayerBound,
    Site,
    product_of,
    register_rule,
    residual_of,
)
from wellposed.nn import AdditiveCoupling, InvertibleResidual, ReversibleSequential


@register_rule(InvertibleResidual)
def _invertible_residual(module: InvertibleResidual, site: Site) -> LayerBound:
    branch = site.child(module.f, "f")
    given = module.lipschitz
    # What was vouched for is the module without the hooks and adapters that it was given since.
    holds = module.norm == site.norm and first_deviation(module.f) is None
    if given is not None and holds and given < branch.lipschitz:
        branch = LayerBound(
            given, "vouched for by lipschitz=", "empirical", out_radius=branch.out_radius
        )
    return residual_of(1.0, 1.0, branch, site.radius)


@register_rule(ReversibleSequential)
def _reversible_sequential(module: ReversibleSequential, site: Site) -> LayerBound:
    return site.chain((f"blocks.{index}", block) for index, block in enumerate(module.blocks))


@register_rule(AdditiveCoupling)
def _additive_coupling(module: AdditiveCoupling, site: Site) -> LayerBound:
    """Two shears ``(a, b) -> (a + f(b), b)``: norm ``(L + sqrt(L^2 + 4))/2`` in norm 2, ``1 + L``
    in tok and inf.

    In tok, f may carry the change of one token's second half to the first half of another, hence no
    root.
    """
    first = site.child(module.f, "f")
    middle = site.radius + first.out_radius
    second = site.child(module.g, "g", radius=middle)
    out_radius = math.hypot(middle, site.radius + second.out_radius)
    shears = [
        LayerBound(_shear(part.lipschitz, site), "shear", part.label, part.reason, out_radius)
        for part in (first, second)
    ]
    return product_of(shears)


def _shear(lipschitz: float, site: Site) -> float:
    if site.norm == 2 and math.isfinite(lipschitz):
        return (lipschitz + math.sqrt(lipschitz**2 + 4)) / 2 * (1 + 1e-12)
    return 1 + lipschitz
