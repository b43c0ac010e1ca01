"""Decide how every matrix of a model is drawn, or refuse the model; nothing is changed here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from wellposed.errors import ConfigError, RoleNotFoundError, listed, nearest_names
from wellposed.hooks import class_name, is_fsdp_module
from wellposed.initialize._norms import matches, norms_of
from wellposed.initialize._stacks import find_layer_stacks
from wellposed.linalg import is_sharded
from wellposed.roles import (
    Roles,
    Verb,
    WeightView,
    batch_advice,
    heads_advice,
    is_table,
    is_transposed,
)
from wellposed.zero_weights import is_copied

Draw = Literal["xavier_uniform", "xavier_normal", "embedding", "given", "kept"]
UNSCALED_ROLES = ("query", "key")
SCALED_ROLES = ("value", "output", "feedforward_in", "feedforward_out")


@dataclass(frozen=True)
class Step:
    """One weight, how it is drawn, and the factor that follows."""

    role: str
    stack: str | None
    layer: int | None
    view: WeightView
    draw: Draw
    factor: float = 1.0
    padding_index: int | None = None
    values: Tensor | None = None
    """Numbers that were drawn already, (out, in)."""


def plan(
    model: nn.Module,
    roles: Roles,
    factors: Mapping[str, float],
    *,
    draw: Draw,
    embeddings: Mapping[str, float] | None,
    exclude: Sequence[str],
    path: str = "",
    verb: Verb,
) -> list[Step]:
    """Return one step for every matrix of ``model``, or raise; nothing is changed here. ``factors``
    are by path of a role; ``embeddings``, by encoder and decoder, None to keep tables."""
    check_not_sharded(model)
    _check_blocks_are_whole(verb, roles)
    steps = _layer_steps(roles, factors, draw)
    steps += _embedding_steps(model, roles, embeddings)
    steps += _head_steps(model, steps, roles, draw)
    steps = _leave_alone(model, roles, steps, exclude)
    check_writable(steps)
    _check_complete(model, roles, steps, exclude, path=path, verb=verb)
    return steps


def _check_complete(
    model: nn.Module,
    roles: Roles,
    steps: Sequence[Step],
    exclude: Sequence[str],
    *,
    path: str,
    verb: Verb,
) -> None:
    """Raise for weights for which there is no step."""
    # Norms, biases, single numbers and numbers of each head, which the attention itself has, need
    # no role.
    planned = {id(step.view.parameter) for step in steps}
    norms = tuple(f"{path}." for path in norms_of(model, roles.norms))
    attention = {role.path for role in roles.attention}
    unmatched: list[str] = []
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        vector = parameter.ndim == 1 and parameter.numel() > 1
        gain = vector and "bias" not in last and owner not in attention
        left = id(parameter) in planned or name.startswith(norms) or matches(name, exclude)
        if (gain or parameter.ndim >= 2) and not left:
            unmatched.append(f"{name} {tuple(parameter.shape)}")

    if unmatched:
        raise RoleNotFoundError(
            f"{verb.name}: {path or type(model).__name__}: {len(unmatched)} weights match no role, so the"
            f" rule does not say what to do with them:\n{listed(unmatched)}\nIf a vector scales a norm of"
            " another name, put torch.nn.Identity() in the norm's place; leave weights as they are with"
            " exclude='...' (roles, or shell-style patterns on parameter names); or find roles of"
            f" matrices. {batch_advice(verb, model, roles)}"
        )


def _check_blocks_are_whole(verb: Verb, roles: Roles) -> None:
    """Raise for weights of attention or a network of which the rest, or the heads, are unknown."""
    parts = [
        f"{weight.role}: {weight.view.label}"
        for weight in roles.loose
        if weight.role in (*UNSCALED_ROLES, *SCALED_ROLES)
    ]
    if parts:
        raise RoleNotFoundError(
            f"{verb.name}: the factors are those of whole blocks, and these weights belong to none that"
            f" is known with its heads:\n{listed(parts)}\n{heads_advice(verb, roles)}"
        )


def _layer_steps(roles: Roles, factors: Mapping[str, float], draw: Draw) -> list[Step]:
    steps: dict[object, Step] = {}
    clashes: list[str] = []
    for weight in roles.weights():
        if weight.role in (*UNSCALED_ROLES, *SCALED_ROLES):
            factor = factors[weight.path] if weight.role in SCALED_ROLES else 1.0
            step = Step(weight.role, weight.stack, weight.layer, weight.view, draw, factor)
            first = steps.setdefault(weight.view.key, step)
            if first.factor != step.factor:
                clashes.append(f"{weight.view.parameter_name}: {first.role} and {step.role}")
    if clashes:
        raise ConfigError("one weight plays two roles with different factors:\n" + listed(clashes))
    return list(steps.values())


def _embedding_steps(
    model: nn.Module, roles: Roles, factors: Mapping[str, float] | None
) -> list[Step]:
    """Return one step for each table; tables outside the decoder get the encoder's factor."""
    keyed = [(id(table.weight.parameter), table) for table in roles.embeddings]
    tables = {key: (f"{table.kind}_embedding", table.weight) for key, table in keyed}
    places = {key: [table.path] for key, table in keyed}
    for path, module in model.named_modules(remove_duplicate=False):
        if is_table(module):
            key = id(module.weight)
            tables.setdefault(key, ("embedding", WeightView(path, module, "weight")))
            places.setdefault(key, []).append(path)

    steps: list[Step] = []
    for key, (role, view) in tables.items():
        step = Step(role, None, None, view, "kept")
        if factors is not None and view.parameter.requires_grad:
            inner = all("decoder" in name for name in places[key])
            factor = factors["decoder" if inner and "decoder" in factors else "encoder"]
            padding = getattr(view.owner, "padding_idx", None)
            step = replace(step, draw="embedding", factor=factor, padding_index=padding)
        steps.append(step)

    return steps


def _head_steps(model: nn.Module, done: Sequence[Step], roles: Roles, draw: Draw) -> list[Step]:
    """Return steps of linear layers outside the stacks; an untied output layer is N(0, 1/d)."""
    planned = {id(step.view.parameter) for step in done}
    paths = (path for stack in find_layer_stacks(roles) for path in stack.layer_paths)
    inside = tuple(f"{path}." if path else "" for path in paths)
    getter: Any = getattr(model, "get_output_embeddings", None)
    output = getter() if callable(getter) else None
    steps: list[Step] = []
    for path, module in model.named_modules():
        transposed = is_transposed(module)
        linear = isinstance(module, nn.Linear) or transposed
        if not linear or id(module.weight) in planned or f"{path}.".startswith(inside):
            continue
        planned.add(id(module.weight))
        view = WeightView(path, module, "weight", transposed=transposed)
        drawn: Draw = "embedding" if module is output and draw == "xavier_uniform" else draw
        role = "output_embedding" if module is output else "other"
        steps.append(Step(role, None, None, view, drawn))

    return steps


def _leave_alone(
    model: nn.Module, roles: Roles, steps: Sequence[Step], exclude: Sequence[str]
) -> list[Step]:
    """Return the steps, with those named in ``exclude`` neither drawn nor scaled."""
    # A weight may have several names and roles; any of them matches.
    named = list(model.named_parameters(remove_duplicate=False))
    played = [(weight.role, weight.view.key) for weight in roles.weights()]
    played += [(step.role, step.view.key) for step in steps]
    names = [*(name for name, _ in named), *norms_of(model, roles.norms)]
    accepted = [*dict.fromkeys(role for role, _ in played), *names]
    unknown = [
        f"{entry!r}; nearest: {', '.join(nearest_names(entry, accepted))}"
        for entry in exclude
        if entry not in accepted and not any(matches(name, [entry]) for name in names)
    ]
    if unknown:
        expected = "expected roles, or patterns on names of parameters and norms, received"
        raise ConfigError(f"exclude: {expected}\n{listed(unknown)}")

    left = {id(parameter) for name, parameter in named if matches(name, exclude)}
    left |= {key for role, key in played if role in exclude}
    return [
        replace(step, draw="kept", factor=1.0)
        if left & {step.view.key, id(step.view.parameter)}
        else step
        for step in steps
    ]


def check_not_sharded(model: nn.Module) -> None:
    """Raise for FSDP2 and tensor parallelism: a rank has shards, or a copy that the next gather replaces."""
    sharded = [
        path or class_name(part)
        for path, part in model.named_modules()
        if is_fsdp_module(part) or any(map(is_sharded, part.parameters(recurse=False)))
    ]
    if sharded:
        raise ConfigError(
            "weights in shards cannot be drawn; initialise the model before fully_shard or"
            f" parallelize_module:\n{listed(sharded)}"
        )

    copied = [name for name, weight in model.named_parameters() if is_copied(weight)]
    if copied:
        raise ConfigError(
            "DeepSpeed ZeRO steps copies of these weights, which would replace drawn ones;"
            f" initialise the model before deepspeed.initialize:\n{listed(copied)}"
        )


def check_writable(steps: Sequence[Step]) -> None:
    """Raise for weights that cannot be drawn in place."""
    views = [step.view for step in steps if step.draw != "kept"]
    problems: dict[str, Callable[[WeightView], bool]] = {
        "layers that compute something else than these weights cannot be drawn; remove the hook, the"
        " replaced forward or the wrapper first": lambda view: view.deviation is not None,
        "parametrized, hooked (prune, weight_norm, spectral_norm) and adapted weights cannot be drawn;"
        " initialise before these are put on": lambda view: view.is_computed,
        "frozen weights (requires_grad=False) would keep these random numbers for good; unfreeze"
        " them, or give the new layers to dt_fixup_": lambda view: not view.parameter.requires_grad,
        "weights on the meta device hold no numbers; materialise the model first": (
            lambda view: view.parameter.is_meta
        ),
    }
    for problem, is_so in problems.items():
        names = [view.parameter_name for view in views if is_so(view)]
        if names:
            raise ConfigError(f"{problem}:\n{listed(names)}")
