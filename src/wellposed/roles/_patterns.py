"""Roles by user patterns on parameter names, for models of no known family."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    ROLE_NAMES,
    AttentionRole,
    EmbeddingRole,
    FeedForwardRole,
    Roles,
    RoleWeight,
)
from wellposed.roles._views import WeightView, is_transposed

_ATTENTION = ("query", "key", "value", "output")
_FEEDFORWARD = {"feedforward_in": "up", "feedforward_gate": "gate", "feedforward_out": "down"}


def roles_from_patterns(
    model: nn.Module, patterns: Mapping[str, str | Sequence[str]], found: Roles
) -> Roles:
    """Return ``found`` with every role named in ``patterns`` replaced by what its patterns
    match."""
    matched = _match(model, patterns)
    replaced = set(matched)
    attention = tuple(role for role in found.attention if replaced.isdisjoint(_ATTENTION))
    feedforward = tuple(role for role in found.feedforward if replaced.isdisjoint(_FEEDFORWARD))
    kept = {"attention": attention, "feedforward": feedforward}
    parts = [
        weight
        for weight in found.weights()
        if weight.role not in replaced and _is_torn(weight, kept, replaced)
    ]
    parts += [weight for weights in matched.values() for weight in weights]
    embeddings = tuple(
        table for table in found.embeddings if f"{table.kind}_embedding" not in replaced
    )
    whole_attention, rest = _group_attention(
        model, [weight for weight in parts if weight.role in _ATTENTION]
    )
    whole_feedforward, more = _group_feedforward(
        [weight for weight in parts if weight.role in _FEEDFORWARD]
    )
    tables = [weight for weight in parts if weight.role.endswith("_embedding")]
    return Roles(
        attention=attention + whole_attention,
        feedforward=feedforward + whole_feedforward,
        embeddings=embeddings + tuple(_embedding(weight) for weight in tables),
        loose=rest + more,
    )


def _is_torn(weight: RoleWeight, kept: Mapping[str, Sequence[object]], replaced: set[str]) -> bool:
    """Tell whether a family's weight lost its part because another role of that part is given by
    pattern."""
    if weight.role in _ATTENTION:
        return not kept["attention"] and not replaced.isdisjoint(_ATTENTION)
    return (
        weight.role in _FEEDFORWARD
        and not kept["feedforward"]
        and not replaced.isdisjoint(_FEEDFORWARD)
    )


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
    place = LocatedModule(
        path.rpartition(".")[0], model.get_submodule(path.rpartition(".")[0]), model
    )
    return RoleWeight(
        role, place.stack, place.layer, place.path, view, place.kind if role in _ATTENTION else None
    )


def _group_attention(
    model: nn.Module, weights: Sequence[RoleWeight]
) -> tuple[tuple[AttentionRole, ...], tuple[RoleWeight, ...]]:
    groups: dict[str, list[RoleWeight]] = {}
    for weight in weights:
        groups.setdefault(weight.path, []).append(weight)
    whole: list[AttentionRole] = []
    loose: list[RoleWeight] = []
    for path, group in groups.items():
        views = {weight.role: weight.view for weight in group}
        if len(views) == len(group) == len(_ATTENTION):
            try:
                whole.append(
                    attention_role(LocatedModule(path, model.get_submodule(path), model), views)
                )
                continue
            except ShapeError:
                pass
        loose += group
    return tuple(whole), tuple(loose)


def _group_feedforward(
    weights: Sequence[RoleWeight],
) -> tuple[tuple[FeedForwardRole, ...], tuple[RoleWeight, ...]]:
    groups: dict[str, list[RoleWeight]] = {}
    for weight in weights:
        groups.setdefault(weight.path, []).append(weight)
    whole: list[FeedForwardRole] = []
    loose: list[RoleWeight] = []
    for path, group in groups.items():
        views = {_FEEDFORWARD[weight.role]: weight.view for weight in group}
        stack, layer = group[0].stack, group[0].layer
        if (
            len(views) == len(group)
            and {"up", "down"} <= set(views)
            and stack is not None
            and layer is not None
        ):
            whole.append(FeedForwardRole(path, stack, layer, **views))
        else:
            loose += group
    return tuple(whole), tuple(loose)


def _embedding(weight: RoleWeight) -> EmbeddingRole:
    kind = "token" if weight.role == "token_embedding" else "position"
    return EmbeddingRole(weight.path, kind, weight.view)
