"""Roles that patterns on parameter names give, in place of those that were read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import nn

from wellposed.errors import (
    ConfigError,
    RoleNotFoundError,
    ShapeError,
    listed,
    nearest_names,
    unknown_name,
)
from wellposed.roles._families import (
    LocatedModule,
    attention_role,
)
from wellposed.roles._registered import ROLE_NAMES
from wellposed.roles._roles import (
    ATTENTION,
    FEEDFORWARD,
    AttentionRole,
    EmbeddingRole,
    FeedForwardRole,
    Part,
    Roles,
    RoleWeight,
    weight_key,
    weight_keys,
)
from wellposed.roles._views import (
    WeightView,
    is_transposed,
    sources_of,
)

Patterns: TypeAlias = Mapping[str, str | Sequence[str]]


def with_patterns(
    model: nn.Module, patterns: Patterns, roles: Roles, *, contradicted: Collection[str] = ()
) -> Roles:
    """Replace roles in ``patterns`` by their matches; regroup what is left of broken parts.

    An attention whose heads the patterns do not tell is left in single weights, with a note. If it
    is one of ``contradicted``, paths of modules whose own names say heads that do not divide the
    weights, and no pass says better, `ShapeError` is raised.
    """
    matched = _match(model, patterns)
    groups = [names for names in (ATTENTION, FEEDFORWARD) if not matched.keys().isdisjoint(names)]
    torn = {role for names in groups for role in names}
    parts = [weight for weight in roles.weights() if weight.role in torn - matched.keys()]
    parts += [weight for weights in matched.values() for weight in weights]
    tables = [table for table in roles.embeddings if f"{table.kind}_embedding" not in matched]
    attention = [] if "query" in torn else [*roles.attention]
    networks = [] if "feedforward_in" in torn else [*roles.feedforward]
    loose: list[RoleWeight] = []
    notes: list[str] = []
    part_of_weights = {weight_keys(part): part for part in (*roles.attention, *roles.feedforward)}
    by_place: dict[tuple[bool, str], list[RoleWeight]] = {}
    for weight in parts:
        if weight.role.endswith("_embedding"):
            kind = "token" if weight.role == "token_embedding" else "position"
            tables.append(EmbeddingRole(weight.path, kind, weight.view))
        elif weight.role not in (*ATTENTION, *FEEDFORWARD):
            loose.append(weight)
        else:
            by_place.setdefault((weight.role in FEEDFORWARD, weight.path), []).append(weight)

    for (_, path), group in by_place.items():
        views = {FEEDFORWARD.get(weight.role, weight.role): weight.view for weight in group}
        role = part_of_weights.get(
            frozenset((name, weight_key(view)) for name, view in views.items())
        )
        try:
            role = role or _grouped(LocatedModule(path, model.get_submodule(path), model), group)
        except ShapeError as error:
            if path in contradicted:
                raise
            notes.append(str(error))
        if isinstance(role, AttentionRole):
            attention.append(role)
        elif isinstance(role, FeedForwardRole):
            networks.append(role)
        else:
            loose += group

    loose += [weight for weight in roles.loose if weight.role not in torn | matched.keys()]
    return replace(
        roles,
        attention=tuple(attention),
        feedforward=tuple(networks),
        embeddings=tuple(tables),
        loose=tuple(loose),
        notes=(*roles.notes, *notes),
    )


def _grouped(located: LocatedModule, weights: Sequence[RoleWeight]) -> Part | None:
    views = {FEEDFORWARD.get(weight.role, weight.role): weight.view for weight in weights}
    stack = weights[0].stack
    if len(views) < len(weights):
        return None
    if views.keys() == {*ATTENTION}:
        return attention_role(located, views)
    if views.keys() >= {"up", "down"} and stack is not None:
        return FeedForwardRole(located.path, stack, weights[0].layer or 0, **views)
    return None


def _match(model: nn.Module, patterns: Patterns) -> dict[str, list[RoleWeight]]:
    parameters = dict(model.named_parameters())
    empty: list[str] = []
    flat: list[str] = []
    matched: dict[str, list[RoleWeight]] = {}
    if not isinstance(patterns, Mapping):
        raise ConfigError(
            f"where: received {patterns!r:.80}; expected a mapping of roles to patterns on"
            " parameter names, as {'query': '*.wq.weight'}"
        )

    for role, role_patterns in patterns.items():
        if role not in ROLE_NAMES:
            raise unknown_name("role", role, ROLE_NAMES)
        for pattern in patterns_of(f"where[{role!r}]", role_patterns):
            names = [name for name in parameters if fnmatchcase(name, pattern)]
            text = f"{role}: {pattern!r} matches"
            if not names:
                near = ", ".join(nearest_names(pattern, parameters))
                empty.append(f"{text} no parameter; nearest: {near or 'the model has none'}")
            for name in names:
                shape = tuple(parameters[name].shape)
                if len(shape) == 2:
                    matched.setdefault(role, []).append(_weight(model, role, name))
                else:
                    flat.append(f"{text} {name}, shape {shape}")

    if empty:
        raise RoleNotFoundError("where: these patterns match nothing:\n" + listed(empty))
    if flat:
        raise ConfigError(
            "where: patterns match biases or other parameters that are no matrices; end them with"
            " '.weight':\n" + listed(flat)
        )

    return matched


def patterns_of(name: str, value: Any) -> tuple[str, ...]:
    """Return the pattern(s) as a tuple; ``name`` is the argument that an error names."""
    patterns = (value,) if isinstance(value, str) else value
    if not isinstance(patterns, Iterable) or not all(isinstance(item, str) for item in patterns):
        raise ConfigError(f"{name}: received {value!r:.80}; expected shell-style pattern(s)")
    return tuple(patterns)


def _weight(model: nn.Module, role: str, name: str) -> RoleWeight:
    path, _, attribute = _plain(name).rpartition(".")
    owner = model.get_submodule(path)
    made = (computed for computed, names in sources_of(owner).items() if attribute in names)
    attribute = next(made, attribute)
    view = WeightView(path, owner, attribute, transposed=is_transposed(owner))
    if role.endswith("_embedding"):
        return RoleWeight(role, None, None, path, view)
    around = path.rpartition(".")[0]
    located = LocatedModule(around, model.get_submodule(around), model)
    kind = located.kind if role in ATTENTION else None
    return RoleWeight(role, located.stack, located.layer, around, view, kind)


def _plain(name: str) -> str:
    """Return the name of a weight, also for a parameter below its parametrization."""
    head, inside, tail = f".{name}".rpartition(".parametrizations.")
    return f"{head}.{tail.split('.')[0]}".lstrip(".") if inside else name
