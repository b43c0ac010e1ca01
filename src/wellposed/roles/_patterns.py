"""Roles by user patterns on parameter names, for models of no known family."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from wellposed.errors import (
    ConfigError,
    RoleNotFoundError,
    ShapeError,
    listed,
    nearest_names,
    unknown_name,
)
from wellposed.roles._located_module import LocatedModule, attention_role
from wellposed.roles._roles import (
    ATTENTION,
    FEEDFORWARD,
    ROLE_NAMES,
    AttentionRole,
    EmbeddingRole,
    FeedForwardRole,
    Roles,
    RoleWeight,
)
from wellposed.roles._views import WeightView, is_transposed


def roles_from_patterns(
    model: nn.Module, patterns: Mapping[str, str | Sequence[str]], found: Roles
) -> Roles:
    """Return ``found`` with every role named in ``patterns`` replaced by what its patterns
    match; what is left of a part that lost one of its weights is grouped anew."""
    matched = _match(model, patterns)
    attention, feedforward = found.attention, found.feedforward
    torn: set[str] = set()
    if not matched.keys().isdisjoint(ATTENTION):
        attention, torn = (), torn.union(ATTENTION)
    if not matched.keys().isdisjoint(FEEDFORWARD):
        feedforward, torn = (), torn.union(FEEDFORWARD)
    parts = [each for each in found.weights() if each.role in torn - matched.keys()]
    parts += [weight for weights in matched.values() for weight in weights]
    tables = [table for table in found.embeddings if f"{table.kind}_embedding" not in matched]
    whole: list[AttentionRole] = []
    networks: list[FeedForwardRole] = []
    loose: list[RoleWeight] = []
    for group in _by_path(parts, ATTENTION):
        views = {weight.role: weight.view for weight in group}
        place = LocatedModule(group[0].path, model.get_submodule(group[0].path), model)
        role = None
        if len(views) == len(group) == len(ATTENTION):
            with suppress(ShapeError):
                role = attention_role(place, views)
        if role is None:
            loose += group
        else:
            whole.append(role)
    for group in _by_path(parts, FEEDFORWARD):
        views = {FEEDFORWARD[weight.role]: weight.view for weight in group}
        stack, layer = group[0].stack, group[0].layer
        if len(views) == len(group) and views.keys() >= {"up", "down"} and stack is not None:
            networks.append(FeedForwardRole(group[0].path, stack, layer or 0, **views))
        else:
            loose += group
    for weight in parts:
        if weight.role.endswith("_embedding"):
            kind = "token" if weight.role == "token_embedding" else "position"
            tables.append(EmbeddingRole(weight.path, kind, weight.view))
    loose += [weight for weight in found.loose if weight.role not in torn | matched.keys()]
    return replace(
        found,
        attention=(*attention, *whole),
        feedforward=(*feedforward, *networks),
        embeddings=tuple(tables),
        loose=tuple(loose),
    )


def _by_path(weights: Iterable[RoleWeight], roles: Iterable[str]) -> Iterable[list[RoleWeight]]:
    """Return the weights of these roles, those of one module together."""
    groups: dict[str, list[RoleWeight]] = {}
    for weight in weights:
        if weight.role in roles:
            groups.setdefault(weight.path, []).append(weight)
    return groups.values()


def _match(
    model: nn.Module, patterns: Mapping[str, str | Sequence[str]]
) -> dict[str, list[RoleWeight]]:
    parameters = dict(model.named_parameters())
    empty: list[str] = []
    flat: list[str] = []
    matched: dict[str, list[RoleWeight]] = {}
    if not isinstance(patterns, Mapping):
        raise ConfigError(
            f"patterns: received {patterns!r:.80}; expected a mapping of roles to patterns on"
            " parameter names, as {'query': '*.wq.weight'}"
        )
    for role, given in patterns.items():
        if role not in ROLE_NAMES:
            raise unknown_name("role", role, ROLE_NAMES)
        for pattern in patterns_of(f"patterns[{role!r}]", given):
            names = [name for name in parameters if fnmatchcase(name, pattern)]
            if not names:
                near = (
                    ", ".join(nearest_names(pattern, parameters)) or "the model has no parameters"
                )
                empty.append(f"{role}: {pattern!r} matches no parameter; nearest: {near}")
            flat += [
                f"{role}: {pattern!r} matches {name}, shape {tuple(parameters[name].shape)}"
                for name in names
                if parameters[name].ndim != 2
            ]
            matched.setdefault(role, []).extend(
                _weight(model, role, name) for name in names if parameters[name].ndim == 2
            )
    if empty:
        raise RoleNotFoundError("patterns match nothing:\n" + listed(empty))
    if flat:
        raise ConfigError(
            "patterns match biases or other parameters that are no matrices; end them with"
            " '.weight':\n" + listed(flat)
        )
    return matched


def patterns_of(name: str, given: Any) -> tuple[str, ...]:
    """Return one pattern or several as a tuple; ``name`` is the argument that an error names."""
    patterns = (given,) if isinstance(given, str) else given
    if not isinstance(patterns, Iterable) or not all(isinstance(each, str) for each in patterns):
        raise ConfigError(
            f"{name}: received {given!r:.80}; expected a shell-style pattern, or several"
        )
    return tuple(patterns)


def _weight(model: nn.Module, role: str, name: str) -> RoleWeight:
    path, _, attribute = name.rpartition(".")
    if ".parametrizations." in f".{path}.":
        owner_path, _, attribute = f".{path}".rpartition(".parametrizations.")
        path = owner_path.lstrip(".")
    owner = model.get_submodule(path)
    view = WeightView(path, owner, attribute, transposed=is_transposed(owner))
    if role.endswith("_embedding"):
        return RoleWeight(role, None, None, path, view)
    around = path.rpartition(".")[0]
    place = LocatedModule(around, model.get_submodule(around), model)
    kind = place.kind if role in ATTENTION else None
    return RoleWeight(role, place.stack, place.layer, around, view, kind)
