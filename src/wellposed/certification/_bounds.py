"""A bound of one module, and bounds of modules that follow each other or stand inside a
residual."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from wellposed.certification._certificate import Label, worst_label
from wellposed.errors import ConfigError


@dataclass(frozen=True)
class LayerBound:
    """What a rule returns: ``|f(x) - f(y)| <= lipschitz |x - y|``, and the 2-norm that no output
    token exceeds."""

    lipschitz: float
    form: str
    label: Label = "certified"
    reason: str = ""
    out_radius: float = math.inf

    def __post_init__(self) -> None:
        if math.isnan(self.lipschitz) or self.lipschitz < 0:
            raise ConfigError(
                f"a rule returned the Lipschitz bound {self.lipschitz}; expected a number >= 0"
                " or inf"
            )


def times(*factors: float) -> float:
    """Return the product with ``0 * inf = 0``: a map that is multiplied by zero is constant.

    >>> times(0.0, math.inf), times(2.0, 3.0)
    (0.0, 6.0)
    """
    # A product of numbers above 0 that underflows is not 0, which would say that the map is
    # constant.
    return 0.0 if 0.0 in factors else max(math.prod(factors), sys.float_info.min)


def product_of(bounds: Iterable[LayerBound], *, radius: float) -> LayerBound:
    """Compose bounds, first applied first: ``Lip(g o f) <= Lip(g) Lip(f)``."""
    parts = list(bounds)
    total = times(*(part.lipschitz for part in parts))
    label = worst_label([part.label for part in parts]) if math.isfinite(total) else "uncertified"
    return LayerBound(
        total,
        "product of the parts",
        _finite_label(total, label),
        _first_reason(parts, total),
        radius,
    )


def residual_of(skip: float, scale: float, branch: LayerBound, *, radius: float) -> LayerBound:
    """Bound ``x -> skip x + scale f(x)`` by ``|skip| + |scale| Lip(f)``; a branch scaled by zero
    counts nothing."""
    total = abs(skip) + times(abs(scale), branch.lipschitz)
    out_radius = times(abs(skip), radius) + times(abs(scale), branch.out_radius)
    form = f"|{skip:g}| + |{scale:.4g}| L(branch)"
    label = worst_label(["certified", branch.label]) if math.isfinite(total) else "uncertified"
    return LayerBound(
        total, form, _finite_label(total, label), _first_reason([branch], total), out_radius
    )


def _finite_label(total: float, label: Label) -> Label:
    """A module without a bound that is multiplied by zero leaves the rest certified."""
    return "certified" if math.isfinite(total) and label == "uncertified" else label


def _first_reason(parts: Iterable[LayerBound], total: float) -> str:
    return (
        ""
        if math.isfinite(total)
        else next((p.reason for p in parts if p.label == "uncertified"), "overflow")
    )
