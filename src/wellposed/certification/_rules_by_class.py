"""Which rule bounds which class of modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from wellposed.certification._as_called import advice, is_class
from wellposed.certification._layer_bound import LayerBound
from wellposed.errors import ConfigError

Rule = Callable[[nn.Module, Any], LayerBound]
R = TypeVar("R", bound=Callable[..., LayerBound])

RULES: dict[type[nn.Module], Rule] = {}
IN_NORM_SUM: set[Rule] = set()
"""Rules that are proved in norm sum too."""


_BY_NAME: dict[str, Rule] = {}
"""Rules of classes of libraries that need not be imported, by module and name."""


def register_by_name(name: str, rule: Rule, *, sums: bool = False) -> None:
    """Register the rule of a class by its full name, whether its library is imported or not."""
    _BY_NAME[name] = rule
    if sums:
        IN_NORM_SUM.add(rule)


def rule_of(kind: type[nn.Module]) -> Rule | None:
    """Return the rule of a class, or None; a class by name only if it is the one that stands there."""
    rule = RULES.get(kind)
    if rule is None and is_class(kind, kind.__module__, kind.__qualname__):
        rule = _BY_NAME.get(f"{kind.__module__}.{kind.__qualname__}")
    return rule


def certifiable_classes() -> tuple[type[nn.Module], ...]:
    """Return the classes that have a rule."""
    return tuple(RULES)


def register_rule(module_type: type[nn.Module], *, sums: bool = False) -> Callable[[R], R]:
    """Register ``rule(module, context)``, a bound ``|f(x) - f(y)| <= lipschitz |x - y|``, for
    `certify`.

    Status: as good as the rule; use ``label="empirical"`` if it is measured, not proved. The rule
    covers this exact class: subclasses need their own (or `inherit_rule` if they compute the same).
    Modules with hooks, a replaced ``forward`` or unusual weights never reach it and are named.
    Parts that it reads by itself must be linear maps, embeddings or containers.

    Args:
        module_type: A subclass of `torch.nn.Module`.
        sums: The rule also holds in norm ``"sum"``, as maps of each token by itself do with their
            constant in norm tok. Otherwise it is never called there.

    Returns:
        A decorator. The rule receives the module and a `RuleContext`, with ``norm``, ``seq_len``,
            ``radius`` (largest 2-norm of an input token), ``operator_norm(weight)``,
            ``child(module, name)``, ``chain(...)``, ``reads(part, Class)`` and ``refuse(reason)``.
            It returns a `LayerBound`. If ``out_radius`` is infinite, later layers that need a ball
            have no bound.

    Raises:
        ConfigError: ``module_type`` is not a module class.

    >>> import torch
    >>> from wellposed.certification import LayerBound, certify, register_rule
    >>> class Halve(torch.nn.Module):
    ...     def forward(self, x): return x / 2
    >>> @register_rule(Halve)
    ... def halve(module, context):
    ...     return LayerBound(0.5, "definition", "exact", out_radius=context.radius / 2)
    >>> certify(Halve(), seq_len=4).total
    0.5
    """
    if not isinstance(module_type, type) or not issubclass(module_type, nn.Module):
        raise ConfigError(
            f"register_rule: expected a subclass of torch.nn.Module, received {module_type!r}"
        )

    def store(rule: R) -> R:
        RULES[module_type] = rule
        if sums:
            IN_NORM_SUM.add(rule)
        return rule

    return store


def inherit_rule(module_type: type[nn.Module]) -> type[nn.Module]:
    """Vouch that ``module_type`` computes what its nearest ancestor with a rule does, and return
    it.

    Status: as good as your word; `certify` checks hooks, patches and weights as for any module.

    Raises:
        ConfigError: it has a ``forward`` of its own, or no ancestor has a rule.

    >>> import torch
    >>> @inherit_rule
    ... class Named(torch.nn.Linear): ...
    >>> Named.__name__
    'Named'
    """
    ancestor, rule = _inherited(module_type)
    if ancestor is None or rule is None or module_type.forward is not ancestor.forward:
        problem = (
            "none of its ancestors has a rule"
            if ancestor is None
            else f"its forward is not {ancestor.__name__}'s"
        )
        raise ConfigError(
            f"inherit_rule: {module_type.__qualname__}: {problem}; write a rule for it with"
            " register_rule"
        )
    RULES[module_type] = rule

    return module_type


def _inherited(kind: type[nn.Module]) -> tuple[type[nn.Module] | None, Rule | None]:
    """Return the nearest ancestor with a rule, and that rule."""
    pairs = ((base, rule) for base in kind.__mro__[1:] if (rule := RULES.get(base)))
    return next(pairs, (None, None))


def without_rule(module: nn.Module, kind: type[nn.Module]) -> str:
    name = f"{kind.__module__}.{kind.__qualname__}"
    ancestor, _ = _inherited(kind)
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
