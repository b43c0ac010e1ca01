"""One rule per module type: how a bound is found for a module, given those of its children."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
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
from wellposed.certification._bounds import LayerBound, product_of
from wellposed.certification._certificate import CertifiedLayer
from wellposed.errors import ConfigError, NotLipschitzError, listed
from wellposed.linalg import MaskKind, Norm, certified_spectral_norm, infinity_norm

T = TypeVar("T")


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
    lost: str = ""
    """The first part without a bound whatever the ball: what follows it has no ball either."""
    reached: list[int] = field(default_factory=list)
    """Ids of the modules that were looked at, in order."""
    vouched: set[int] = field(default_factory=set)
    """Ids of parts of other classes that a rule reads by itself."""
    passed: list[tuple[str, nn.Module, float]] = field(default_factory=list)
    """Path, module and bound of every module with a bound in this norm, for the cross-check."""
    calm: frozenset[str] = frozenset()
    """Class names whose bounds count as 1 at most: what a total would be without them."""
    dtype: torch.dtype = torch.float64
    """The widest floating type among the weights of the whole module, which its activations
    have."""


@dataclass(frozen=True)
class Site:
    """Where a rule stands: the norm, the number of tokens, the mask, the ball of the input, and
    access to children."""

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

    def remember(self, owner: object, kind: str, compute: Callable[[], T]) -> T:
        """Return ``compute()``, called once for each owner and kind in a certificate, whatever the
        norm or route."""
        key = (id(owner), kind)
        if key not in self.shared.memory:
            # The owner is kept, so that its id is not given to another object during this call.
            self.shared.memory[key] = (owner, compute())
        return self.shared.memory[key][1]

    def child(self, module: nn.Module, name: str, *, radius: float | None = None) -> LayerBound:
        """Return the bound of a child whose input tokens are within ``radius`` (this site's where
        not given)."""
        path = f"{self.path}.{name}" if self.path else name
        return bound_of(
            module, replace(self, path=path, radius=self.radius if radius is None else radius)
        )

    def chain(self, children: Iterable[tuple[str, nn.Module]]) -> LayerBound:
        """Return the bound of children applied one after the other; the ball is carried from each
        to the next."""
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
        """Write a step that is no module of its own (pooling, a shift) on the certificate and
        return its bound."""
        path = f"{self.path}.{name}" if self.path else name
        kind = name if name == "pool" else type(module).__name__
        bound = _calmed(bound, kind, self.shared)
        self.shared.rows.append(_row(path, kind, bound, self.radius))
        return bound

    def at_radius(self, radius: float) -> Site:
        """Return this site with another ball."""
        return replace(self, radius=radius)

    def with_tokens(self, count: int) -> Site:
        """Return this site for ``count`` tokens, as after a class token was put in front."""
        return replace(self, shared=replace(self.shared, seq_len=count))

    def in_norm(self, norm: Norm, *, calm: frozenset[str] | None = None) -> Site:
        """Return this site in another norm, with rows of its own, to compare two routes; see
        `adopt`."""
        here = self.shared
        shared = Shared(
            norm,
            self.seq_len,
            self.min_tokens,
            here.masks,
            memory=here.memory,
            dtype=here.dtype,
            calm=here.calm if calm is None else calm,
        )
        return replace(self, shared=shared)

    @property
    def dtype(self) -> torch.dtype:
        """The widest floating type among the weights of the whole module; float64 where it has
        none."""
        return self.shared.dtype

    def reads(self, module: nn.Module, *kinds: type[nn.Module]) -> None:
        """Say that the rule itself knows what ``module`` computes, where it is of one of ``kinds``;
        hooks are still refused."""
        part = without_compiler(module)
        if not kinds or class_called(part) in kinds:
            self.shared.vouched.add(id(part))

    def adopt(self, other: Site, bound: LayerBound, form: str) -> LayerBound:
        """Replace this certificate's rows by those of another route, and return its bound under the
        name ``form``."""
        # The row of the module itself is still open (None) and stays.
        self.shared.rows[:] = [*self.shared.rows[:1], *other.shared.rows]
        self.shared.passed[:] = []
        self.shared.head = other.shared.head
        self.shared.notes.append(f"layer bounds are in norm {other.norm}")
        return replace(bound, form=form)

    def set_head(self, weight: Tensor, body: LayerBound) -> None:
        """Tell the certificate the last linear map, whose row differences sharpen
        `Certificate.radius`."""
        if self.path == "":
            self.shared.head = (weight.detach().clone(), body.lipschitz)

    def refuse(self, reason: str) -> LayerBound:
        """Return the answer for a module without a bound: infinite, labelled ``uncertified``, with
        the reason."""
        self.shared.lost = self.shared.lost or self.path or "the module itself"
        return LayerBound(math.inf, "none", "uncertified", reason)

    def refuse_without_ball(self, reason: str) -> LayerBound:
        """Return the answer for a module that has a bound on a ball alone, where no ball reaches
        it."""
        lost = self.shared.lost
        advice = (
            f"no ball reaches it, as {lost} has no bound" if lost else f"pass radius=, {_RADIUS}"
        )
        return LayerBound(math.inf, "none", "uncertified", f"{reason}; {advice}")


_RADIUS = "a 2-norm that no input token exceeds"


class Refused(Exception):  # noqa: N818 (an answer, no fault)
    """Raised by what a rule calls where there is no bound; its text is the reason."""


Rule = Callable[[nn.Module, Site], LayerBound]
R = TypeVar("R", bound=Callable[..., LayerBound])


_RULES: dict[type[nn.Module], Rule] = {}
_RULES_BY_NAME: dict[str, Rule] = {}


def certifiable_classes() -> tuple[type[nn.Module], ...]:
    """Return the classes that have a rule; of those registered by name, the ones whose library is
    imported."""
    named = (_class_named(name) for name in _RULES_BY_NAME)
    return (*_RULES, *(kind for kind in named if kind is not None))


def register_rule(module_type: type[nn.Module] | str) -> Callable[[R], R]:
    """Teach `certify` that ``rule(module, site)`` bounds every ``module_type``: ``|f(x) - f(y)| <=
    lipschitz |x - y|``.

    Status: as good as the rule; give ``label="empirical"`` where it is measured, not proved. The
    rule is for this very
    class: a subclass may compute something else and has no bound until it is registered too
    (`inherit_rule`, where it computes the same). A module with hooks, a replaced ``forward`` or
    unusual weights never reaches its rule, and is named; nor does a part that the rule reads by
    itself.

    Args:
        module_type: a subclass of `torch.nn.Module`, or its full name (``"library.module.Class"``)
            where the rule
            should not import the library: it is for the class that stands under this name when it
            is met.

    Returns:
        A decorator. The rule gets the module and a `Site`: ``site.norm``, ``site.seq_len``,
        ``site.radius`` (largest 2-norm of an input token), ``site.operator_norm(weight)``,
        ``site.child(module, name)``, ``site.chain(...)``, ``site.reads(part)``,
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
    if not isinstance(module_type, str) and not (
        isinstance(module_type, type) and issubclass(module_type, nn.Module)
    ):
        raise ConfigError(
            "register_rule: expected a subclass of torch.nn.Module or its name, received"
            f" {module_type!r}"
        )

    def store(rule: R) -> R:
        if isinstance(module_type, str):
            _RULES_BY_NAME[module_type] = rule
        else:
            _RULES[module_type] = rule
        return rule

    return store


def _class_named(name: str) -> type[nn.Module] | None:
    module, _, kind = name.rpartition(".")
    return getattr(sys.modules.get(module), kind, None)


def _rule_of(kind: type[nn.Module]) -> Rule | None:
    name = f"{kind.__module__}.{kind.__qualname__}"
    if (
        kind in _RULES
        or name not in _RULES_BY_NAME
        or not is_class(kind, kind.__module__, kind.__qualname__)
    ):
        return _RULES.get(kind)
    return _RULES_BY_NAME[name]


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
    rows, reached = site.shared.rows, site.shared.reached
    rows.append(None)
    place = len(rows) - 1
    bound = _calmed(_as_called(module, site, reached), class_called(module).__name__, site.shared)
    reached.append(id(module))
    inner = next(
        (row.path for row in rows[place + 1 :] if row is not None and row.label == "uncertified"),
        None,
    )
    reason = f"see {inner}" if bound.label == "uncertified" and inner is not None else bound.reason
    rows[place] = _row(
        site.path, class_called(module).__name__, replace(bound, reason=reason), site.radius
    )
    site.shared.passed.append((site.path, module, bound.lipschitz))
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


def _as_called(module: nn.Module, site: Site, reached: list[int]) -> LayerBound:
    kind, before = class_called(module), len(reached)
    rule = _rule_of(kind)
    if rule is None:
        return site.refuse(_without_rule(module, kind))
    differs = deviation(module)
    if differs is not None:
        return site.refuse(differs)
    try:
        bound = rule(module, site)
    except Refused as error:
        bound = site.refuse(str(error))
    except ConfigError:
        raise
    except Exception as error:
        # A rule may stumble over a part that is not what it should be: without values, or of
        # another class.
        differs = first_deviation(module)
        if differs is None and isinstance(error, AttributeError):
            differs = (
                f"a part lacks what the rule of {kind.__name__} reads: {error}; put the class's own"
                " part back"
            )
        differs = differs or _differing_part(module, site, reached[before:])
        if differs is None:
            raise
        return site.refuse(differs)
    differs = (
        None if bound.label == "uncertified" else _differing_part(module, site, reached[before:])
    )
    return bound if differs is None else site.refuse(differs)


def _differing_part(module: nn.Module, site: Site, reached: Sequence[int]) -> str | None:
    """Say which part that the rule read by itself differs from its class when it is called."""
    for path, part in parts_not_reached(module, frozenset(reached)):
        differs = deviation(part)
        if differs is not None:
            return f"{path} ({class_called(part).__name__}): {differs}"
        unknown = unknown_class(part)
        if unknown is not None and id(part) not in site.shared.vouched:
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


def _calmed(bound: LayerBound, kind: str, shared: Shared) -> LayerBound:
    return replace(bound, lipschitz=min(1.0, bound.lipschitz)) if kind in shared.calm else bound


def _row(path: str, module: str, bound: LayerBound, radius: float) -> CertifiedLayer:
    return CertifiedLayer(
        path, module, bound.lipschitz, bound.form, bound.label, bound.reason, radius
    )
