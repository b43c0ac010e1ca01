"""One rule per module type: how a bound is found for a module, given those of its children."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import singledispatch
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from wellposed.certification._certificate import CertifiedLayer, Label, worst_label
from wellposed.errors import ConfigError
from wellposed.linalg import MaskKind, Norm, certified_spectral_norm, infinity_norm

T = TypeVar("T")


@dataclass(frozen=True)
class LayerBound:
    """What a rule returns: ``|f(x) - f(y)| <= lipschitz |x - y|``, and the 2-norm that no output token exceeds."""

    lipschitz: float
    form: str
    label: Label = "certified"
    reason: str = ""
    out_radius: float = math.inf

    def __post_init__(self) -> None:
        if math.isnan(self.lipschitz) or self.lipschitz < 0:
            raise ConfigError(f"a rule returned the Lipschitz bound {self.lipschitz}; expected a number >= 0 or inf")


@dataclass
class Shared:
    """What all sites of one `certify` call share."""

    norm: Norm
    seq_len: int
    min_tokens: int
    masks: set[MaskKind] = field(default_factory=set)
    rows: list[CertifiedLayer | None] = field(default_factory=list)
    memory: dict[tuple[int, str], tuple[object, Any]] = field(default_factory=dict)
    head: tuple[Tensor, float] | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Site:
    """Where a rule stands: the norm, the number of tokens, the mask, the ball of the input, and access to children."""

    path: str
    radius: float
    """Largest 2-norm of a token entering the module; infinite on the whole space."""
    shared: Shared = field(repr=False)
    given_mask: MaskKind | None = None
    """The attention pattern, where the caller or an enclosing module has fixed it."""

    @property
    def mask(self) -> MaskKind:
        """The attention pattern to assume; asking for it writes it on the certificate."""
        mask = self.given_mask or "any"
        self.shared.masks.add(mask)
        return mask

    def under_mask(self, mask: MaskKind) -> Site:
        """Return this site with the attention pattern that the module fixes, unless the caller has named one."""
        return self if self.given_mask else replace(self, given_mask=mask)

    @property
    def norm(self) -> Norm:
        """``"tok"``, ``"inf"`` or ``2``; every bound of one certificate is in this norm."""
        return self.shared.norm

    @property
    def seq_len(self) -> int:
        """At most this many tokens."""
        return self.shared.seq_len

    @property
    def min_tokens(self) -> int:
        """At least this many tokens that are not padding."""
        return self.shared.min_tokens

    def spectral_norm(self, weight: Tensor) -> float:
        """Certified largest singular value of ``weight`` (``(m, n)``), computed once per tensor and certificate."""
        return self.remember(weight, "2", lambda: float(certified_spectral_norm(weight.detach(), method="cholesky")))

    def operator_norm(self, weight: Tensor) -> float:
        """Bound of ``x -> weight @ x`` for each token, in the norm of this certificate."""
        if self.norm != "inf":
            return self.spectral_norm(weight)
        return self.remember(weight, "inf", lambda: float(infinity_norm(weight.detach())))

    def remember(self, owner: object, kind: str, compute: Callable[[], T]) -> T:
        """Return ``compute()``, called once for each owner and kind in a certificate, whatever the norm or route."""
        key = (id(owner), kind)
        if key not in self.shared.memory:
            # The owner is kept, so that its id is not given to another object during this call.
            self.shared.memory[key] = (owner, compute())
        return self.shared.memory[key][1]

    def child(self, module: nn.Module, name: str, *, radius: float | None = None) -> LayerBound:
        """Return the bound of a child whose input tokens are within ``radius`` (this site's where not given)."""
        path = f"{self.path}.{name}" if self.path else name
        return bound_of(module, replace(self, path=path, radius=self.radius if radius is None else radius))

    def chain(self, children: Iterable[tuple[str, nn.Module]]) -> LayerBound:
        """Return the bound of children applied one after the other; the ball is carried from each to the next."""
        bounds: list[LayerBound] = []
        radius = self.radius
        for name, module in children:
            bounds.append(self.child(module, name, radius=radius))
            radius = bounds[-1].out_radius
        return product_of(bounds, radius=radius if bounds else self.radius)

    def product(self, bounds: Sequence[LayerBound]) -> LayerBound:
        """Return the bound of maps applied one after the other, given in that order."""
        return product_of(bounds, radius=bounds[-1].out_radius)

    def record(self, module: nn.Module, name: str, bound: LayerBound) -> LayerBound:
        """Write a step that is no module of its own (pooling, a shift) on the certificate and return its bound."""
        path = f"{self.path}.{name}" if self.path else name
        self.shared.rows.append(_row(path, name if name == "pool" else type(module).__name__, bound, self.radius))
        return bound

    def at_radius(self, radius: float) -> Site:
        """Return this site with another ball."""
        return replace(self, radius=radius)

    def in_norm(self, norm: Norm) -> Site:
        """Return this site in another norm, with rows of its own, to compare two routes; see `adopt`."""
        shared = Shared(norm, self.seq_len, self.min_tokens, self.shared.masks, memory=self.shared.memory)
        return replace(self, shared=shared)

    def adopt(self, other: Site, bound: LayerBound, form: str) -> LayerBound:
        """Replace this certificate's rows by those of another route, and return its bound under the name ``form``."""
        # The row of the module itself is still open (None) and stays.
        self.shared.rows[:] = [*self.shared.rows[:1], *other.shared.rows]
        self.shared.head = other.shared.head
        self.shared.notes.append(f"layer bounds are in norm {other.norm}")
        return replace(bound, form=form)

    def set_head(self, weight: Tensor, body: LayerBound) -> None:
        """Tell the certificate the last linear map, whose row differences sharpen `Certificate.radius`."""
        if self.path == "":
            self.shared.head = (weight.detach(), body.lipschitz)

    def refuse(self, reason: str) -> LayerBound:
        """Return the answer for a module without a bound: infinite, labelled ``uncertified``, with the reason."""
        return LayerBound(math.inf, "none", "uncertified", reason)


def times(*factors: float) -> float:
    """Return the product with ``0 * inf = 0``: a map that is multiplied by zero is constant.

    >>> times(0.0, math.inf), times(2.0, 3.0)
    (0.0, 6.0)
    """
    return 0.0 if 0.0 in factors else math.prod(factors)


def product_of(bounds: Iterable[LayerBound], *, radius: float) -> LayerBound:
    """Compose bounds, first applied first: ``Lip(g o f) <= Lip(g) Lip(f)``."""
    parts = list(bounds)
    total = times(*(part.lipschitz for part in parts))
    label = worst_label([part.label for part in parts]) if math.isfinite(total) else "uncertified"
    return LayerBound(total, "product of the parts", _finite_label(total, label), _first_reason(parts, total), radius)


def residual_of(skip: float, scale: float, branch: LayerBound, *, radius: float) -> LayerBound:
    """Bound ``x -> skip x + scale f(x)`` by ``|skip| + |scale| Lip(f)``; a branch scaled by zero counts nothing."""
    total = abs(skip) + times(abs(scale), branch.lipschitz)
    out_radius = times(abs(skip), radius) + times(abs(scale), branch.out_radius)
    form = f"|{skip:g}| + |{scale:.4g}| L(branch)"
    label = worst_label(["certified", branch.label]) if math.isfinite(total) else "uncertified"
    return LayerBound(total, form, _finite_label(total, label), _first_reason([branch], total), out_radius)


def _finite_label(total: float, label: Label) -> Label:
    """A module without a bound that is multiplied by zero leaves the rest certified."""
    return "certified" if math.isfinite(total) and label == "uncertified" else label


def _first_reason(parts: Iterable[LayerBound], total: float) -> str:
    return "" if math.isfinite(total) else next((p.reason for p in parts if p.label == "uncertified"), "overflow")


Rule = Callable[[nn.Module, Site], LayerBound]
R = TypeVar("R", bound=Callable[..., LayerBound])


@singledispatch
def _rule(module: object, site: Site) -> LayerBound:
    return site.refuse(
        f"no rule for {type(module).__module__}.{type(module).__qualname__}; "
        "add one with wellposed.certification.register_rule"
    )


def register_rule(module_type: type[nn.Module]) -> Callable[[R], R]:
    """Teach `certify` that ``rule(module, site)`` bounds every ``module_type``: ``|f(x) - f(y)| <= lipschitz |x - y|``.

    Status: as good as the rule; give ``label="empirical"`` where it is measured, not proved. Single dispatch on the
    module's class, so subclasses inherit the rule and a rule for the subclass wins.

    Args:
        module_type: a subclass of `torch.nn.Module`.

    Returns:
        A decorator. The rule gets the module and a `Site`: ``site.norm``, ``site.seq_len``, ``site.radius`` (largest
        2-norm of an input token), ``site.operator_norm(weight)``, ``site.child(module, name)``, ``site.chain(...)``,
        ``site.refuse(reason)``; and returns a `LayerBound`. ``out_radius`` may be left infinite: layers further on that
        need a ball then have no bound.

    Raises:
        ConfigError: ``module_type`` is not a module class.

    >>> import torch
    >>> from wellposed.certification import LayerBound, certify, register_rule
    >>> class Halve(torch.nn.Module):
    ...     def forward(self, x): return x / 2
    >>> @register_rule(Halve)
    ... def halve(module, site): return LayerBound(0.5, "definition", "exact", out_radius=site.radius / 2)
    >>> certify(Halve(), seq_len=4).total
    0.5
    """
    if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
        raise ConfigError(f"register_rule: expected a subclass of torch.nn.Module, received {module_type!r}")

    def store(rule: R) -> R:
        _rule.register(module_type, rule)
        return rule

    return store


def bound_of(module: nn.Module, site: Site) -> LayerBound:
    """Apply the rule of the module's class and record the answer as a row of the certificate."""
    rows = site.shared.rows
    rows.append(None)
    place = len(rows) - 1
    bound = _rule(module, site)
    inner = next((row.path for row in rows[place + 1 :] if row is not None and row.label == "uncertified"), None)
    reason = f"see {inner}" if bound.label == "uncertified" and inner is not None else bound.reason
    rows[place] = _row(site.path, type(module).__name__, replace(bound, reason=reason), site.radius)
    return bound


def _row(path: str, module: str, bound: LayerBound, radius: float) -> CertifiedLayer:
    return CertifiedLayer(path, module, bound.lipschitz, bound.form, bound.label, bound.reason, radius)


def has_rule(module_type: type[nn.Module]) -> bool:
    """Whether some rule covers the class."""
    return _rule.dispatch(module_type) is not _rule.dispatch(object)


def as_float(value: Tensor | float) -> float:
    """Return a 0-dim tensor or number as a float, without gradient."""
    return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
