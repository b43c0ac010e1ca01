"""One rule per module type: how a bound is found for a module, given those of its children."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from wellposed.certification._as_called import (
    advice,
    class_called,
    deviation,
    first_deviation,
    is_class,
    parts_not_reached,
    unknown_class,
    without_compiler,
)
from wellposed.certification._certificate import CertifiedLayer, Label, worst_label
from wellposed.errors import ConfigError, NotLipschitzError, listed
from wellposed.linalg import MaskKind, TokenNorm, certified_spectral_norm, infinity_norm

T = TypeVar("T")


@dataclass(frozen=True)
class LayerBound:
    """What a rule returns: ``|f(x) - f(y)| <= lipschitz |x - y|``, and the 2-norm that no output
    token exceeds."""

    lipschitz: float
    form: str
    label: Label = "certified"
    reason: str = ""
    out_radius: float = math.inf
    skip: float = 0.0
    """``f(x) = skip x + r(x) + constant`` where r has the bound ``lipschitz - skip``; 0 is always
    right."""

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
    # A product of numbers above 0 that underflows, on its way too, is not 0, which would say that
    # the map is constant.
    least = sys.float_info.min
    return 0.0 if 0.0 in factors else reduce(lambda a, b: max(a * b, least), factors, 1.0)


def product_of(bounds: Sequence[LayerBound], radius: float | None = None) -> LayerBound:
    """Compose bounds, first applied first: ``Lip(g o f) <= Lip(g) Lip(f)``; skips multiply too."""
    total = times(*(part.lipschitz for part in bounds))
    out_radius = bounds[-1].out_radius if radius is None else radius
    found = _composed(total, "product of the parts", bounds, out_radius)
    return replace(found, skip=math.prod(part.skip for part in bounds))


def residual_of(skip: float, scale: float, branch: LayerBound, radius: float) -> LayerBound:
    """Bound ``x -> skip x + scale f(x)`` by ``|skip| + |scale| Lip(f)``; a branch scaled by zero
    counts nothing."""
    total = abs(skip) + times(abs(scale), branch.lipschitz)
    out_radius = times(abs(skip), radius) + times(abs(scale), branch.out_radius)
    identity = LayerBound(1.0, "identity")
    form = f"|{skip:g}| + |{scale:.4g}| L(branch)"
    found = _composed(total, form, [identity, branch], out_radius)
    return replace(found, skip=max(skip, 0.0))


def _composed(
    total: float, form: str, parts: Sequence[LayerBound], out_radius: float
) -> LayerBound:
    if math.isinf(total):
        reasons = (part.reason for part in parts if part.label == "uncertified")
        return LayerBound(total, form, "uncertified", next(reasons, "overflow"), out_radius)
    label = worst_label([part.label for part in parts])
    # A module without a bound that is multiplied by zero leaves the rest certified.
    return LayerBound(total, form, "certified" if label == "uncertified" else label, "", out_radius)


@dataclass(frozen=True)
class Visit:
    """A row of the certificate, with the module it is of and the norm its bound is in."""

    row: CertifiedLayer
    module: nn.Module | None
    norm: TokenNorm


@dataclass
class Walk:
    """What is written down on the way through a module."""

    visits: list[Visit | None] = field(default_factory=list)
    """None for a module whose parts are being looked at."""
    masks: set[MaskKind] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    memory: dict[tuple[int, object], tuple[object, Any]] = field(default_factory=dict)
    vouched: set[int] = field(default_factory=set)
    """Ids of parts that a rule reads by itself and whose class it knows."""
    head: tuple[Tensor, float] | None = None
    skip: float | None = None
    without_bound: str = ""
    """The first part without a bound whatever the ball: what follows it has no ball either."""


@dataclass(frozen=True)
class Site:
    """Where a rule stands: the norm, the number of tokens, the mask, the ball of the input, and
    access to children."""

    path: str
    radius: float
    """Largest 2-norm of a token entering the module; infinite on the whole space."""
    norm: TokenNorm
    """``"tok"``, ``"inf"``, ``2`` or ``"sum"``; every bound of one certificate is in this norm."""
    seq_len: int
    """At most this many tokens."""
    min_tokens: int = 1
    """At least this many tokens that are not padding."""
    given_mask: MaskKind | None = None
    """The attention pattern, where the caller or an enclosing module has fixed it."""
    dtype: torch.dtype = torch.float64
    """The widest floating type among the weights of the whole module; float64 where it has none."""
    ignored_classes: frozenset[str] = frozenset()
    """Class names whose bounds count as 1 at most: what a total would be without them."""
    walk: Walk = field(default_factory=Walk, repr=False)

    @property
    def mask(self) -> MaskKind:
        """The attention pattern to assume; asking for it writes it on the certificate."""
        mask = self.given_mask or "any"
        self.walk.masks.add(mask)
        return mask

    def under_mask(self, mask: MaskKind) -> Site:
        """Return this site with the attention pattern that the module fixes; the caller may only
        ask for a wider one.

        Raises:
            ConfigError: the caller named another pattern than the module runs.
        """
        if self.given_mask not in (None, "any", mask):
            raise ConfigError(
                f"certify: mask={self.given_mask!r}, but {self.path or 'the module'} runs {mask}"
                " attention, so the bound would be of another map; leave mask out, or pass"
                f" {mask!r} or 'any'"
            )
        return replace(self, given_mask=self.given_mask or mask)

    def spectral_norm(self, weight: Tensor) -> float:
        """Certified largest singular value of ``weight`` (``(m, n)``), computed once per tensor and
        certificate."""
        return self.remember(
            weight, "2", lambda: float(certified_spectral_norm(weight.detach(), method="cholesky"))
        )

    def operator_norm(self, weight: Tensor) -> float:
        """Bound of ``x -> weight @ x`` for each token, in the norm of this certificate."""
        if self.norm != "inf":
            return self.spectral_norm(weight)
        return self.remember(weight, "inf", lambda: float(infinity_norm(weight.detach())))

    def remember(self, owner: object, kind: object, compute: Callable[[], T]) -> T:
        """Return ``compute()``, called once for each owner and kind in a certificate, whatever the
        norm or route."""
        key = (id(owner), kind)
        if key not in self.walk.memory:
            # The owner is kept, so that its id is not given to another object during this call.
            self.walk.memory[key] = (owner, compute())
        return self.walk.memory[key][1]

    def child(self, module: nn.Module, name: str, *, radius: float | None = None) -> LayerBound:
        """Return the bound of a child whose input tokens are within ``radius`` (this site's where
        not given)."""
        radius = self.radius if radius is None else radius
        return bound_of(module, replace(self, path=self._path(name), radius=radius))

    def chain(self, children: Iterable[tuple[str, nn.Module]]) -> LayerBound:
        """Return the bound of children applied one after the other; the ball is carried from each
        to the next."""
        bounds: list[LayerBound] = []
        radius = self.radius
        for name, module in children:
            bounds.append(self.child(module, name, radius=radius))
            radius = bounds[-1].out_radius
        return product_of(bounds, radius)

    def product(self, bounds: Sequence[LayerBound]) -> LayerBound:
        """Return the bound of maps applied one after the other, given in that order."""
        return product_of(bounds)

    def record(self, module: nn.Module, name: str, bound: LayerBound) -> LayerBound:
        """Write a step that is no module of its own (pooling, a shift) on the certificate and
        return its bound."""
        kind = name if name == "pool" else type(module).__name__
        bound = self._counted(bound, kind)
        row = _row(self._path(name), kind, bound, self.radius)
        self.walk.visits.append(Visit(row, None, self.norm))
        return bound

    def at_radius(self, radius: float) -> Site:
        """Return this site with another ball."""
        return replace(self, radius=radius)

    def in_norm(self, norm: TokenNorm, ignored_classes: frozenset[str] | None = None) -> Site:
        """Return this site in another norm, with rows of its own, to compare two routes; see
        `adopt`."""
        if ignored_classes is None:
            ignored_classes = self.ignored_classes
        walk = replace(self.walk, visits=[], head=None, without_bound="")
        return replace(self, norm=norm, ignored_classes=ignored_classes, walk=walk)

    def reads(self, module: nn.Module, *kinds: type[nn.Module]) -> None:
        """Say that the rule itself knows what ``module`` computes, where it is of one of ``kinds``;
        hooks are still refused."""
        part = without_compiler(module)
        if not kinds or class_called(part) in kinds:
            self.walk.vouched.add(id(part))

    def adopt(self, other: Site, bound: LayerBound, form: str) -> LayerBound:
        """Replace this certificate's rows by those of another route, and return its bound under the
        name ``form``."""
        # The rows of the module itself and of those around it are still open (None) and stay.
        visits = self.walk.visits
        visits[len(visits) - visits[::-1].index(None) :] = other.walk.visits
        self.walk.head, self.walk.skip = other.walk.head, other.walk.skip
        self.walk.notes.append(f"layer bounds are in norm {other.norm}")
        return replace(bound, form=form)

    def set_head(self, last: Any, body: LayerBound, *, skip: float | None = None) -> None:
        """Tell the certificate the last linear map, or its weight, whose row differences sharpen
        `Certificate.radius`, and what part of a state is its own token; see `LayerBound.skip`.

        A module of another class than torch's own linear layer is left out: what it makes of its
        weight is not known.
        """
        if isinstance(last, nn.Module):
            last = last.weight if class_called(last) is nn.Linear else None
        if self.path == "" and last is not None:
            self.walk.head = (last.detach().clone(), body.lipschitz)
            self.walk.skip = skip

    def refuse(self, reason: str) -> LayerBound:
        """Return the answer for a module without a bound: infinite, labelled ``uncertified``, with
        the reason."""
        self.walk.without_bound = self.walk.without_bound or self.path or "the module itself"
        return LayerBound(math.inf, "none", "uncertified", reason)

    def refuse_without_ball(self, reason: str) -> LayerBound:
        """Return the answer for a module that has a bound on a ball alone, where no ball reaches
        it."""
        lost = self.walk.without_bound
        what = f"no ball reaches it, as {lost} has no bound" if lost else f"pass radius=, {_RADIUS}"
        return LayerBound(math.inf, "none", "uncertified", f"{reason}; {what}")

    def _path(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def _counted(self, bound: LayerBound, kind: str) -> LayerBound:
        least = min(1.0, bound.lipschitz)
        return replace(bound, lipschitz=least) if kind in self.ignored_classes else bound


_RADIUS = "a 2-norm that no input token exceeds"


class Refused(Exception):  # noqa: N818 (an answer, no fault)
    """Raised by what a rule calls where there is no bound; its text is the reason."""


Rule = Callable[[nn.Module, Site], LayerBound]
R = TypeVar("R", bound=Callable[..., LayerBound])

# Under the class, or under its full name where its library is not imported for the rule's sake.
_RULES: dict[type[nn.Module] | str, Rule] = {}
_IN_NORM_SUM: set[Rule] = set()
"""Those that are proved in norm sum too."""


def certifiable_classes() -> tuple[type[nn.Module], ...]:
    """Return the classes that have a rule; of those registered by name, the ones whose library is
    imported."""
    found = (_class_named(kind) if isinstance(kind, str) else kind for kind in _RULES)
    return tuple(kind for kind in found if kind is not None)


def register_rule(module_type: type[nn.Module] | str, *, sums: bool = False) -> Callable[[R], R]:
    """Teach `certify` that ``rule(module, site)`` bounds every ``module_type``: ``|f(x) - f(y)| <=
    lipschitz |x - y|``.

    Status: as good as the rule; give ``label="empirical"`` where it is measured, not proved. The
    rule is for this very class: a subclass may compute something else and has no bound until it is
    registered too (`inherit_rule`, where it computes the same). A module with hooks, a replaced
    ``forward`` or unusual weights never reaches its rule, and is named; nor does a part that the
    rule reads by itself, unless it is a linear map, an embedding or a container.

    Args:
        module_type: a subclass of `torch.nn.Module`, or its full name (``"library.module.Class"``)
            where the rule should not import the library: it is for the class that stands under this
            name when it is met.
        sums: the rule is right in norm ``"sum"`` too, where it is never asked otherwise. A map of
            each token by itself is, with its constant in norm tok.

    Returns:
        A decorator. The rule gets the module and a `Site`: ``site.norm``, ``site.seq_len``,
        ``site.radius`` (largest 2-norm of an input token), ``site.operator_norm(weight)``,
        ``site.child(module, name)``, ``site.chain(...)``, ``site.reads(part, Class)``,
        ``site.refuse(reason)``; and returns a `LayerBound`. ``out_radius`` may be left infinite:
        layers further on that need a ball then have no bound.

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
    is_module = isinstance(module_type, type) and issubclass(module_type, nn.Module)
    if not isinstance(module_type, str) and not is_module:
        raise ConfigError(
            "register_rule: expected a subclass of torch.nn.Module or its name, received"
            f" {module_type!r}"
        )

    def store(rule: R) -> R:
        _RULES[module_type] = rule
        if sums:
            _IN_NORM_SUM.add(rule)
        return rule

    return store


def refuse_always(reason: str, *kinds: type[nn.Module]) -> None:
    """Register that modules of these classes have no bound, and why."""
    for kind in kinds:
        register_rule(kind)(lambda _, site: site.refuse(reason))


def _class_named(name: str) -> type[nn.Module] | None:
    module, _, kind = name.rpartition(".")
    return getattr(sys.modules.get(module), kind, None)


def _rule_of(kind: type[nn.Module]) -> Rule | None:
    by_name = is_class(kind, kind.__module__, kind.__qualname__)
    named = _RULES.get(f"{kind.__module__}.{kind.__qualname__}") if by_name else None
    return _RULES.get(kind, named)


def _ancestor_with_rule(kind: type[nn.Module]) -> type[nn.Module] | None:
    return next((base for base in kind.__mro__[1:] if _rule_of(base) is not None), None)


def inherit_rule(module_type: type[nn.Module]) -> type[nn.Module]:
    """Vouch that ``module_type`` computes what its nearest ancestor with a rule computes, and
    return it.

    Status: as good as your word; `certify` checks the rest (hooks, patches, weights) as for any
    module.

    Raises:
        ConfigError: it has a ``forward`` of its own, or no ancestor has a rule.

    >>> import torch
    >>> @inherit_rule
    ... class Named(torch.nn.Linear): ...
    >>> Named.__name__
    'Named'
    """
    ancestor = _ancestor_with_rule(module_type)
    rule = None if ancestor is None else _rule_of(ancestor)
    if ancestor is None or rule is None or module_type.forward is not ancestor.forward:
        found = (
            "none of its ancestors has a rule"
            if ancestor is None
            else f"its forward is not {ancestor.__name__}'s"
        )
        raise ConfigError(
            f"inherit_rule: {module_type.__qualname__}: {found}; write a rule for it with"
            " register_rule"
        )
    _RULES[module_type] = rule
    return module_type


def bound_of(module: nn.Module, site: Site) -> LayerBound:
    """Apply the rule of the module's exact class and record the answer as a row of the certificate.

    Every module of a certificate passes here. It is refused where a call of it differs from its
    class, and so is a rule that read a part by itself which differs.
    """
    module = without_compiler(module)
    kind = class_called(module).__name__
    visits, memory = site.walk.visits, site.walk.memory
    visits.append(None)
    place = len(visits) - 1
    asked = (site.norm, site.seq_len, site.min_tokens, site.given_mask, site.radius)
    known = memory.get((id(module), asked))
    bound = _as_called(module, site, place) if known is None else known[1]
    if len(visits) == place + 1 and bound.label != "uncertified":
        # No part of it was asked, so another walk through the same module need not ask again.
        memory[id(module), asked] = module, bound
    bound = site._counted(bound, kind)
    row = _row(site.path, kind, bound, site.radius)
    if bound.label == "uncertified":
        inner = (visit.row for visit in visits[place + 1 :] if visit is not None)
        first = next((inside for inside in inner if inside.label == "uncertified"), None)
        row = row if first is None else replace(row, reason=f"see {first.path}")
    visits[place] = Visit(row, module, site.norm)
    return bound


def refuse_deviations(module: nn.Module, caller: str, *known: type[nn.Module]) -> None:
    """Raise `NotLipschitzError` where a call of the module or of a part differs from its class, or
    where that is not ``known``; all are named."""
    offenders = [
        f"{path or '(the module itself)'}: {reason}"
        for path, part in [("", module), *parts_not_reached(module, ())]
        if (reason := deviation(part) or unknown_class(part, *known)) is not None
    ]
    if offenders:
        raise NotLipschitzError(
            f"{caller}: what these parts compute is not known from their"
            f" weights:\n{listed(offenders)}"
        )


def _as_called(module: nn.Module, site: Site, place: int) -> LayerBound:
    kind = class_called(module)
    rule = _rule_of(kind)
    if rule is None:
        return site.refuse(_without_rule(module, kind))
    if site.norm == "sum" and rule not in _IN_NORM_SUM:
        return site.refuse(
            f"no bound of {kind.__name__} is proved in norm sum, which counts words; the parts of"
            " the variant lipschitz have one (B14)"
        )
    differs = deviation(module)
    if differs is not None:
        return site.refuse(differs)
    try:
        bound = rule(module, site)
    except Refused as error:
        return site.refuse(str(error))
    except Exception as error:
        # A rule may stumble over a part that is not what it should be: without values, or of
        # another class.
        differs = first_deviation(module)
        if differs is None and isinstance(error, ConfigError):
            if str(error).startswith("certify: "):
                raise
            where = f"{site.path or 'the module itself'} ({kind.__name__})"
            raise ConfigError(f"certify: {where}: {error}") from error
        if differs is None and isinstance(error, AttributeError):
            differs = (
                f"a part lacks what the rule of {kind.__name__} reads: {error}; put the class's own"
                " part back"
            )
        differs = differs or _differing_part(module, site, place)
        if differs is None:
            raise
        return site.refuse(differs)
    differs = None if bound.label == "uncertified" else _differing_part(module, site, place)
    return bound if differs is None else site.refuse(differs)


def _differing_part(module: nn.Module, site: Site, place: int) -> str | None:
    """Say which part that the rule read by itself differs from its class when it is called."""
    reached = {id(visit.module) for visit in site.walk.visits[place:] if visit is not None}
    for path, part in parts_not_reached(module, reached):
        differs = deviation(part)
        if differs is not None:
            return f"{path} ({class_called(part).__name__}): {differs}"
        unknown = unknown_class(part)
        if unknown is not None and id(part) not in site.walk.vouched:
            return f"{path} is {unknown}"
    return None


def _without_rule(module: nn.Module, kind: type[nn.Module]) -> str:
    name = f"{kind.__module__}.{kind.__qualname__}"
    ancestor = _ancestor_with_rule(kind)
    if ancestor is None:
        return (
            f"no rule for {name}; add one with"
            f" wellposed.certification.register_rule{advice(module)}"
        )
    return (
        f"{name} is a subclass of {ancestor.__name__} and may compute something else; if it does"
        " not, say so with wellposed.certification.inherit_rule, else add a rule with"
        f" register_rule{advice(module)}"
    )


def _row(path: str, module: str, bound: LayerBound, radius: float) -> CertifiedLayer:
    return CertifiedLayer(
        path, module, bound.lipschitz, bound.form, bound.label, bound.reason, radius
    )
