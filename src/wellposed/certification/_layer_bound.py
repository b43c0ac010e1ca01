"""The result of a rule, and of several in sequence."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce

from torch import Tensor

from wellposed.certification._certificate import Label, worst_label
from wellposed.certification.bounds import Link
from wellposed.errors import ConfigError

SKIP_INSIDE = " with the skip"
"""Part of the form of a residual that is bounded as one map."""


@dataclass(frozen=True)
class LayerBound:
    """A rule's result: ``|f(x) - f(y)| <= lipschitz |x - y|``, and the largest 2-norm of outputs."""

    lipschitz: float
    form: str
    label: Label = "certified"
    reason: str = ""
    out_radius: float = math.inf
    skip: float = 0.0
    """``f(x) = skip x + r(x) + constant``, r of bound ``lipschitz - skip``; 0 is always right."""
    fresh: bool = False
    """Whether the output never shares memory with the input; False is always right."""
    overwrites: str = ""
    """The part that changes the module's input in place; `certify` fills it in."""
    unproved: bool = False
    """Whether there is no bound only for want of a proof, so that a claim may supply one."""

    links: tuple[Link, ...] | None = field(default=None, repr=False, compare=False)
    """The map itself, if it is linear maps and activations of each token in sequence, so that
    several in sequence, and a residual, get bounds below the product (B18, B19)."""

    @property
    def has_skip_inside(self) -> bool:
        """Whether this is a residual that was bounded as one map."""
        return self.form.startswith("multipliers") and SKIP_INSIDE in self.form

    slope: Callable[[], Tensor | float] | None = field(default=None, repr=False, compare=False)
    """Computes ``lipschitz`` again with the gradient of the weights, for `certified_bound`."""

    def differentiable(self) -> Tensor | float:
        """Return the bound, with the gradient of the weights if this kind of part has one."""
        return self.lipschitz if self.slope is None else self.slope()

    def __post_init__(self) -> None:
        if math.isnan(self.lipschitz) or self.lipschitz < 0:
            raise ConfigError(
                f"a rule returned the Lipschitz bound {self.lipschitz}; expected a number >= 0"
                " or inf"
            )


def times(*factors: float) -> float:
    """Return the product with ``0 * inf = 0``: a map that is multiplied by zero is constant."""
    # Underflow must not give 0, which would make the map constant.
    smallest = sys.float_info.min
    return 0.0 if 0.0 in factors else reduce(lambda a, b: max(a * b, smallest), factors, 1.0)


def composed(
    total: float, form: str, parts: Sequence[LayerBound], out_radius: float, skip: float
) -> LayerBound:
    label = worst_label([part.label for part in parts])
    reason = ""
    without = [part for part in parts if part.label == "uncertified"]
    if math.isinf(total):
        label = "uncertified"
        reason = without[0].reason if without else "overflow"
    elif label == "uncertified":
        # If the part without a bound is multiplied by zero, the rest is certified.
        label = "certified"
    unproved = label == "uncertified" and all(part.unproved for part in without)
    return LayerBound(total, form, label, reason, out_radius, skip, unproved=unproved)


def joined_links(parts: Sequence[LayerBound]) -> tuple[Link, ...] | None:
    """Return the links of maps in sequence, or None if one of them has none."""
    every: list[Link] = []
    for part in parts:
        if part.links is None:
            return None
        every += part.links
    return tuple(every)


def first_to_overwrite(parts: Sequence[LayerBound]) -> str:
    """Return which of some maps in sequence changes the input of the first, or ''."""
    for part in parts:
        if part.overwrites:
            return part.overwrites
        if part.fresh:
            break
    return ""


class Refused(Exception):  # noqa: N818 (an answer, no fault)
    """Raised by a helper of a rule if there is no bound; its text is the reason."""
