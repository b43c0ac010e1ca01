"""The walk through a module: contexts of rules and the certificate being built."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from wellposed.certification._as_called import (
    changes_input,
    class_called,
    differing_parts,
    first_deviation,
    overwritten,
    uncertifiable_reason,
    without_compiler,
)
from wellposed.certification._centres import Centre
from wellposed.certification._certificate import SEE, CertifiedLayer
from wellposed.certification._layer_bound import (
    SKIP_INSIDE,
    LayerBound,
    Refused,
    composed,
    first_to_overwrite,
    joined_links,
    times,
)
from wellposed.certification._rules_by_class import IN_NORM_SUM, rule_of, without_rule
from wellposed.certification.bounds import NO_BOUND, Link, Tight, tight_slope, tightest_bound
from wellposed.errors import ConfigError, is_about_resources
from wellposed.linalg import MaskKind, TokenNorm, certified_spectral_norm, infinity_norm

T = TypeVar("T")
Named = tuple[str, nn.Module]
Branch = Callable[["RuleContext"], "LayerBound"]


@dataclass(frozen=True)
class Visit:
    """A row of the certificate, its module, and the norm of its bound."""

    row: CertifiedLayer
    module: nn.Module | None
    norm: TokenNorm
    overwrites: str = ""
    """The part that changes the module's input, as far as its rule says."""


@dataclass
class CertificateBuilder:
    """The certificate that is being built during the walk."""

    visits: list[Visit | None] = field(default_factory=list)
    """None for a module whose parts are being visited."""
    masks: set[MaskKind] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    memory: dict[tuple[int, object], tuple[object, Any]] = field(default_factory=dict)
    vouched: set[int] = field(default_factory=set)
    """Ids of parts that a rule reads by itself and whose class it knows."""
    overwriting: set[str] = field(default_factory=set)
    """Parts that change their input, until a rule composes them by `product` or `residual`."""
    head: tuple[Tensor, float] | None = None
    skip: float | None = None
    centres: Mapping[int, Centre] = field(default_factory=dict)
    """Recorded inputs by module id, of a certificate around given inputs."""
    without_bound: str = ""
    """The first part without a bound on any ball; what follows it has no ball either."""

    def visit(self, module: nn.Module, context: RuleContext) -> LayerBound:
        """Return the bound of a module by the rule of its exact class, and record it as a row. It
        is refused if its call, or a part that its rule read, differs from its class."""
        module = without_compiler(module)
        kind = class_called(module).__name__
        index = len(self.visits)
        self.visits.append(None)
        context = self._near_centre(module, context)
        asked = (context.norm, context.tokens, context.min_tokens, context.given_mask)
        key = (id(module), (*asked, context.radius, context.is_branch, context.moved))
        remembered = self.memory.get(key)
        bound = self._answer(module, context, index) if remembered is None else remembered[1]
        if changes_input(module) and not bound.overwrites:
            bound = replace(bound, fresh=False, overwrites=f"{context.path or 'it'} ({kind})")
        if bound.overwrites:
            self.overwriting.add(bound.overwrites)

        inner = [visit.row for visit in self.visits[index + 1 :] if visit is not None]
        if not inner and bound.label != "uncertified":
            # Without rows of parts the bound can be reused when the module is reached again.
            self.memory[key] = module, bound

        row = context._row(context.path, kind, bound)
        without = [inside for inside in inner if inside.label == "uncertified"]
        # A reason of its own, such as a claim that does not apply, is kept.
        if bound.label == "uncertified" and bound.reason in {part.reason for part in without}:
            row = replace(row, reason=f"{SEE}{without[0].path}")
        self.visits[index] = Visit(row, module, context.norm, bound.overwrites)
        return bound

    def _near_centre(self, module: nn.Module, context: RuleContext) -> RuleContext:
        """Shrink the ball to one that contains the balls around the recorded tokens."""
        centre = self.centres.get(id(module))
        if centre is None or math.isinf(context.moved):
            return context
        size = (centre.size + centre.reach(context.moved)) * (1 + 1e-9)
        return replace(context, radius=min(context.radius, size))

    def _answer(self, module: nn.Module, context: RuleContext, index: int) -> LayerBound:
        kind = class_called(module)
        rule = rule_of(kind)
        if rule is None:
            return context.refuse(without_rule(module, kind), unproved=True)
        if context.norm == "sum" and rule not in IN_NORM_SUM:
            return context.refuse(
                f"no bound of {kind.__name__} is proved in norm sum, which counts words; use the parts"
                " of the variant lipschitz (B14)",
                unproved=True,
            )

        differs = uncertifiable_reason(module)
        if differs is not None:
            return context.refuse(differs)
        if not rule.__module__.startswith("wellposed."):
            # It was written for balls about 0, and may call a part on a multiple of the input.
            context = replace(context, moved=math.inf)

        composed_before = self.overwriting.copy()
        try:
            bound = rule(module, context)
        except Refused as error:
            return context.refuse(str(error))
        except Exception as error:
            if is_about_resources(error):
                raise
            differs = self._why_failed(error, module, context, index)
            if differs is None:
                raise
            return context.refuse(differs)

        differs = None if bound.label == "uncertified" else self._differing_part(module, index)
        loose = self.overwriting - composed_before - {bound.overwrites}
        if loose:
            # The rule bounds this part by itself, and may use the part's input again.
            differs = differs or overwritten(min(loose))
        return bound if differs is None else context.refuse(differs)

    def _why_failed(
        self, error: Exception, module: nn.Module, context: RuleContext, index: int
    ) -> str | None:
        """Return the part for which a rule failed: without values, or of another class; or None."""
        kind = class_called(module)
        differs = first_deviation(module)
        if differs is None and isinstance(error, ConfigError):
            if str(error).startswith("certify: "):
                return None
            where = f"{context.path or 'the module itself'} ({kind.__name__})"
            raise ConfigError(f"certify: {where}: {error}") from error

        if differs is None and isinstance(error, AttributeError):
            differs = (
                f"a part lacks what the rule of {kind.__name__} reads: {error}; put the"
                " class's own part back"
            )
        return differs or self._differing_part(module, index)

    def _differing_part(self, module: nn.Module, index: int) -> str | None:
        """Return how a part that the rule read by itself differs from its class, or None."""
        reached = {id(visit.module) for visit in self.visits[index:] if visit is not None}
        return next(differing_parts(module, reached, self.vouched), None)


Slope = Callable[[], Tensor | float]


def _slope_of_product(slopes: Sequence[Slope]) -> Tensor | float:
    return math.prod(slope() for slope in slopes)


def _slope_by_multipliers(links: Sequence[Link], tight: Tight) -> Tensor | float:
    slope = tight_slope(links, tight)
    return tight.value if slope is None else slope


@dataclass(frozen=True)
class RuleContext:
    """Context of a rule: norm, tokens, mask and ball, and methods that bound parts."""

    path: str
    radius: float
    """Largest 2-norm of a token entering the module; infinite on the whole space."""
    norm: TokenNorm
    """``"tok"``, ``"inf"``, ``2`` or ``"sum"``, the norm of every bound of the certificate."""
    tokens: int | None
    """Largest number of tokens; None if the caller does not say."""
    min_tokens: int = 1
    """Smallest number of tokens that are not padding."""
    given_mask: MaskKind | None = None
    """The attention pattern, if the caller or an enclosing module has fixed it."""
    dtype: torch.dtype = torch.float64
    """The widest floating type among the weights of the whole module; float64 if it has none."""
    builder: CertificateBuilder = field(default_factory=CertificateBuilder, repr=False)
    """The certificate that this context writes to."""
    is_branch: bool = False
    """Whether a residual around the module will bound it together with its skip."""
    moved: float = math.inf
    """Largest distance of a token from its recorded centre; infinite without centres."""

    @property
    def seq_len(self) -> int:
        """Largest number of tokens; a `ConfigError` if the caller gave none."""
        if self.tokens is None:
            raise ConfigError(
                f"certify: the bound of {self.path or 'the module'} depends on the number of"
                " tokens; pass seq_len=, the largest"
            )
        return self.tokens

    @property
    def mask(self) -> MaskKind:
        """Attention pattern to assume; reading it records it on the certificate."""
        mask = self.given_mask or "any"
        self.builder.masks.add(mask)
        return mask

    def under_mask(self, mask: MaskKind) -> RuleContext:
        """Return this context with the pattern that the module fixes. The caller may ask for a
        wider one; any other raises `ConfigError`."""
        if self.given_mask not in (None, "any", mask):
            raise ConfigError(
                f"certify: mask={self.given_mask!r}, but {self.path or 'the module'} runs {mask}"
                " attention, so the bound would be of another map; omit mask, or pass"
                f" {mask!r} or 'any'"
            )
        return replace(self, given_mask=self.given_mask or mask)

    def at_radius(self, radius: float) -> RuleContext:
        """Return this context with another ball, of which no centre is known; see `after`."""
        return replace(self, radius=radius, moved=math.inf)

    def after(self, bound: LayerBound) -> RuleContext:
        """Return the context of what reads the outputs of a part that has this bound here."""
        moved = times(bound.lipschitz, self.moved)
        return replace(self, radius=bound.out_radius, moved=moved)

    def centre_of(self, module: nn.Module) -> Centre | None:
        """Return the recorded tokens of a module, if its tokens stay within ``moved`` of them."""
        if math.isinf(self.moved) or self.norm != "tok":
            return None
        return self.builder.centres.get(id(module))

    def in_norm(self, norm: TokenNorm) -> RuleContext:
        """Return this context in another norm, with its own rows; see `of_one_vector`."""
        builder = replace(self.builder, visits=[], head=None, without_bound="")
        return replace(self, norm=norm, builder=builder)

    def spectral_norm(self, weight: Tensor) -> float:
        """Return the certified spectral norm of ``weight`` ``(m, n)``, computed once."""
        return self.remember(
            weight, "2", lambda: float(certified_spectral_norm(weight.detach(), method="cholesky"))
        )

    def operator_norm(self, weight: Tensor) -> float:
        """Return the bound of ``x -> weight @ x`` for each token, in the norm of this certificate."""
        if self.norm != "inf":
            return self.spectral_norm(weight)
        return self.remember(weight, "inf", lambda: float(infinity_norm(weight.detach())))

    def remember(self, owner: object, kind: object, compute: Callable[[], T]) -> T:
        """Return ``compute()``, called once per owner and kind in a certificate."""
        memory = self.builder.memory
        key = (id(owner), kind)
        if key not in memory:
            # A reference to the owner keeps its id from being reused during this call.
            memory[key] = (owner, compute())
        return memory[key][1]

    def child(self, module: nn.Module, name: str, *, radius: float | None = None) -> LayerBound:
        """Return the bound of a child on tokens within ``radius`` (default: this context's)."""
        moved = self.moved if radius is None else math.inf
        radius = self.radius if radius is None else radius
        inside = replace(self, path=self._path(name), radius=radius, moved=moved)
        return self.builder.visit(module, inside)

    def chain(self, children: Iterable[Named]) -> LayerBound:
        """Return the bound of children in sequence; each passes its ball on to the next."""
        bounds: list[LayerBound] = []
        context = self
        for name, module in children:
            bounds.append(context.child(module, name))
            context = context.after(bounds[-1])
        return self.product(bounds)

    def chain_of(self, owner: nn.Module, paths: str) -> LayerBound:
        """Return the bound of parts in sequence; the path ``layers.*`` is a whole list."""
        every: list[str] = []
        for path in paths.split():
            if not path.endswith("*"):
                every.append(path)
                continue
            stack: Any = owner.get_submodule(path[:-2])
            every += [f"{path[:-1]}{number}" for number in range(len(stack))]
        return self.chain((path, owner.get_submodule(path)) for path in every)

    def product(self, bounds: Sequence[LayerBound]) -> LayerBound:
        """Return the bound of maps in sequence, ``Lip(g o f) <= Lip(g) Lip(f)``; skips multiply."""
        total = times(*(part.lipschitz for part in bounds))
        skip = math.prod(part.skip for part in bounds)
        out_radius = bounds[-1].out_radius if bounds else self.radius
        self.builder.overwriting.difference_update(part.overwrites for part in bounds)
        form = "product of the parts"
        inside = [f"{part.lipschitz:.4g} by {part.form}" for part in bounds if part.has_skip_inside]
        form += f": {', '.join(inside)}" if inside else ""
        links = joined_links(bounds)
        slope = partial(_slope_of_product, [part.differentiable for part in bounds])
        if not (self.is_branch and links is not None):
            total, form, slope = self._below_the_product(bounds, total, form, slope)

        return replace(
            composed(total, form, bounds, out_radius, skip),
            slope=slope,
            fresh=any(part.fresh for part in bounds),
            overwrites=first_to_overwrite(bounds),
            links=links,
        )

    def _below_the_product(
        self, bounds: Sequence[LayerBound], total: float, form: str, slope: Slope
    ) -> tuple[float, str, Slope]:
        """Return a smaller total, its form and slope, if runs of linear maps and activations have
        one."""
        factors: list[float] = []
        forms: list[str] = []
        slopes: list[Slope] = []
        for has_links, run in groupby(bounds, key=lambda part: part.links is not None):
            parts = list(run)
            product = times(*(part.lipschitz for part in parts))
            links = joined_links(parts)
            tight = self.tightest(links) if has_links else NO_BOUND
            factors.append(min(product, tight.value))
            if tight.value < product:
                forms.append(tight.form)
                slopes.append(partial(_slope_by_multipliers, links or (), tight))
            else:
                slopes += [part.differentiable for part in parts]

        smaller = times(*factors)
        if not forms or not smaller < total:
            return total, form, slope
        form = forms[0] if len(factors) == 1 else f"{form}, {forms[0]}"
        return smaller, form, partial(_slope_of_product, slopes)

    def tightest(
        self, links: Sequence[Link] | None, skip: float = 0.0, scale: float = 1.0
    ) -> Tight:
        """Return a bound of ``skip x + scale f(x)`` by multipliers, f being ``links``; infinite in
        norm inf, and if there is none. Computed once for the same links."""
        if links is None or self.norm == "inf":
            return NO_BOUND
        key = (0, (skip, scale, *map(id, links)))
        memory = self.builder.memory
        if key not in memory:
            # The links stay referenced, so their ids are not reused during this call.
            memory[key] = (tuple(links), tightest_bound(links, skip, scale))
        return memory[key][1]

    def residual(self, branch: LayerBound, skip: float = 1.0, scale: float = 1.0) -> LayerBound:
        """Return the bound ``|skip| + |scale| Lip(f)`` of ``x -> skip x + scale f(x)``, or one of
        the whole map by multipliers. A branch that changes x is refused: the sum adds what it
        wrote."""
        self.builder.overwriting.discard(branch.overwrites)
        if branch.overwrites:
            return self.refuse(overwritten(branch.overwrites))

        # In norm sum, the skip is known apart for words (B14).
        has_one_map = self.norm != "sum" and scale != 0
        inside = self.tightest(branch.links, skip, scale) if has_one_map else NO_BOUND
        within = branch
        if math.isinf(inside.value):
            apart = self.tightest(branch.links)
            if apart.value < branch.lipschitz:
                slope = partial(_slope_by_multipliers, branch.links or (), apart)
                within = replace(branch, lipschitz=apart.value, slope=slope)

        total = abs(skip) + times(abs(scale), within.lipschitz)
        out_radius = times(abs(skip), self.radius) + times(abs(scale), branch.out_radius)
        parts = [LayerBound(1.0, "identity"), branch]
        form = f"|{skip:g}| + |{scale:.4g}| L(branch)"
        if inside.value < total:
            form = f"{inside.form}{SKIP_INSIDE}"
            # The rest without the skip may be steeper than the difference of the two bounds.
            joined = composed(inside.value, form, parts, out_radius, 0.0)
            slope = partial(_slope_by_multipliers, branch.links or (), inside)
            return replace(joined, fresh=True, slope=slope)

        joined = composed(total, form, parts, out_radius, max(skip, 0.0))
        return replace(
            joined,
            fresh=True,
            slope=lambda: abs(skip) + (abs(scale) * within.differentiable() if scale else 0.0),
        )

    def sublayer(
        self,
        branch: Branch,
        *,
        before: Named | None = None,
        after: Named | None = None,
        coefficients: tuple[float, float] = (1.0, 1.0),
    ) -> LayerBound:
        """Return the bound of ``x -> N_after(a x + b f(N_before(x)))``; both norms are optional."""
        inside = self.chain([before] if before else [])
        within = replace(self.after(inside), is_branch=True)
        inner = within.product([inside, branch(within)])
        joined = self.residual(inner, *coefficients)
        if after is None:
            return joined
        normed = self.product([joined, self.after(joined).child(after[1], after[0])])
        return replace(normed, form=f"{joined.form}, then the norm")

    def layer(self, owner: nn.Module, *branches: tuple[str, Branch], before: bool) -> LayerBound:
        """Return the bound of residual sublayers, each with the path of its norm: first, or last."""
        context = self
        bounds = []
        for path, branch in branches:
            norm = (path, owner.get_submodule(path))
            first, last = (norm, None) if before else (None, norm)
            bounds.append(context.sublayer(branch, before=first, after=last))
            context = context.after(bounds[-1])
        return self.product(bounds)

    def record(self, module: nn.Module, name: str, bound: LayerBound) -> LayerBound:
        """Record a step that is no module (pooling, a shift), and return its bound."""
        kind = name if name == "pool" else type(module).__name__
        row = self._row(self._path(name), kind, bound)
        self.builder.visits.append(Visit(row, None, self.norm))
        return bound

    def reads(self, module: nn.Module, *kinds: type[nn.Module]) -> None:
        """Vouch for a part of one of ``kinds`` that the rule reads; hooks are still refused."""
        part = without_compiler(module)
        if not kinds or class_called(part) in kinds:
            self.builder.vouched.add(id(part))

    def set_head(self, last: Any, body: LayerBound, *, skip: float | None = None) -> None:
        """Record the last linear map (torch's own, or its weight) and the bound of all before it,
        for `Certificate.radius`, and what part of a state is its own token."""
        if isinstance(last, nn.Module):
            last = last.weight if class_called(last) is nn.Linear else None
        if self.path == "" and last is not None:
            self.builder.head = (last.detach().clone(), body.lipschitz)
            self.builder.skip = skip

    def refuse(self, reason: str, *, unproved: bool = False) -> LayerBound:
        """Return the certificate of a module without a bound: infinite, ``uncertified``. It is
        ``unproved`` if a claim of the user (``lipschitz=``) may stand in."""
        path = self.path or "the module itself"
        self.builder.without_bound = self.builder.without_bound or path
        return LayerBound(math.inf, "none", "uncertified", reason, unproved=unproved)

    def refuse_without_ball(self, reason: str) -> LayerBound:
        """Return the certificate of a module that needs a ball and has none."""
        earlier = self.builder.without_bound
        remedy = "pass radius=, the largest 2-norm of an input token"
        remedy = f"no ball reaches it, as {earlier} has no bound" if earlier else remedy
        reason = f"{reason}; {remedy}"
        return LayerBound(math.inf, "none", "uncertified", reason, unproved=True)

    def _row(self, path: str, kind: str, bound: LayerBound) -> CertifiedLayer:
        return CertifiedLayer(
            path,
            module=kind,
            lipschitz=bound.lipschitz,
            form=bound.form,
            label=bound.label,
            reason=bound.reason,
            radius=self.radius,
        )

    def _path(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name
