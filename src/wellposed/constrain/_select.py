"""Selects weights of a model by names, patterns, types, or roles."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from wellposed.constrain._role_slices import Per, candidates_with_roles
from wellposed.constrain._weight_slice import WeightSlice
from wellposed.errors import (
    ConfigError,
    RoleNotFoundError,
    WellposedError,
    listed,
    nearest_names,
)
from wellposed.model_checks import require_module
from wellposed.roles import (
    ATTENTION,
    FEEDFORWARD,
    ROLE_NAMES,
    Roles,
    Verb,
    batch_advice,
    find_roles_for,
    heads_advice,
)

Asked: TypeAlias = str | type[nn.Module]
Where: TypeAlias = Asked | Sequence[Asked]
CONSTRAIN = Verb.by_name("constrain_", "model, optimizer")
BY_HEAD = Verb("constrain_", "constrain_(model, optimizer, ..., batch=batch)", "")
"""`constrain_` of single heads, which names of weights do not tell."""
LAYERS = "layers"
"""Role of every matrix of attention and feed-forward networks, experts included."""
_LAYER_ROLES = (*ATTENTION, *FEEDFORWARD, "latent")


def unwrap_model(model: nn.Module, call: str) -> nn.Module:
    """Return the module inside DistributedDataParallel and ``torch.compile`` wrappers."""
    require_module(call, model)
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
            model = model._orig_mod
        else:
            return model


def roles_or_error(verb: Verb, model: nn.Module, batch: Any) -> Roles | WellposedError:
    """Return the roles of a model, or why there are none: selection by name needs none."""
    try:
        return find_roles_for(verb, model, batch)
    except WellposedError as error:
        return error


def select_weights(
    model: nn.Module,
    where: Where | None,
    *,
    per: Per = None,
    batch: Any = None,
    model_roles: Roles | WellposedError | None = None,
    verb: Verb = CONSTRAIN,
    parameters_only: bool = False,
) -> list[WeightSlice]:
    """Return the weights that ``where`` matches by name, type or role, in order of the modules.

    Every part of ``where`` must match, else `RoleNotFoundError`; a part that is the name of a module
    and another's role is a `ConfigError`. Parts of a fused weight (GPT-2's
    ``c_attn``) are returned separately, with ``per="head"`` also heads of queries, keys and values.
    The role ``"layers"`` is every role of attention and feed-forward networks in the model.
    ``model_roles`` are those that `roles_or_error` returned, if a caller needs them too. Errors speak
    in the words of ``verb``.
    With ``parameters_only`` the caller reads no rows, so roles may interleave.
    """
    if model_roles is None:
        model_roles = roles_or_error(verb, model, batch)
    candidates = candidates_with_roles(model, model_roles, per)
    chosen: set[int] = set()
    unmatched: list[str] = []
    wanted: list[str] = []
    present = frozenset().union(*(part.roles for part in candidates))
    for asked in _asked(where):
        matched = _matching(asked, candidates)
        roles = _LAYER_ROLES if asked == LAYERS else [role for role in ROLE_NAMES if role == asked]
        players = {id(part) for part in candidates if not part.roles.isdisjoint(roles)}
        if matched and players and matched != players:
            raise ConfigError(
                f"where={asked!r} is the name of a module, and a role of other weights; write"
                f" where='re:{asked}' for the module, or names of all weights with that role"
            )
        if roles and not matched:
            wanted += [role for role in roles if role in present] or roles
        elif not matched:
            unmatched.append(_no_match(asked, candidates))
        chosen |= matched

    if unmatched:
        raise RoleNotFoundError("\n".join(unmatched))
    _check_roles(verb, model, wanted, present, model_roles)
    played = {id(part) for part in candidates if not part.roles.isdisjoint(wanted)}
    selected = [part for part in candidates if id(part) in chosen | played]
    if per is not None:
        _check_heads(verb, selected, model_roles)

    scattered = [part.label for part in selected if part.scattered and id(part) in played]
    if scattered and not parameters_only:
        by_head = "give per='head', or " if verb is CONSTRAIN else ""
        raise ConfigError(
            f"{verb.name}: the rows of roles interleave in these weights; {by_head}name the whole weight in"
            f" where=:\n{listed(scattered)}"
        )

    return selected


def _check_roles(
    verb: Verb,
    model: nn.Module,
    wanted: Iterable[str],
    present: frozenset[str],
    model_roles: Roles | WellposedError,
) -> None:
    """Raise for a role that no weight of the model plays."""
    if wanted and isinstance(model_roles, WellposedError):
        raise model_roles
    missing = ", ".join(role for role in wanted if role not in present)
    if missing and isinstance(model_roles, Roles):
        have = ", ".join(role for role in ROLE_NAMES if role in present)
        problem = f"no weight of the model plays the role {missing}; it has {have}"
        lines = [f"{verb.name}: {problem}", *model_roles.notes]
        raise RoleNotFoundError("\n".join([*lines, batch_advice(verb, model, model_roles)]))


def _check_heads(
    verb: Verb, selected: Iterable[WeightSlice], model_roles: Roles | WellposedError
) -> None:
    """Raise if heads are asked for and those of a selected query, key or value are unknown."""
    if isinstance(model_roles, WellposedError):
        raise model_roles
    # Extra projections, such as a rotary key that all heads read, belong to no head.
    headless = {
        (id(weight.view.owner), weight.view.attribute, weight.role)
        for weight in model_roles.loose
        if weight.role in ATTENTION[:3] and not weight.heads
    }
    unknown = [
        part.label
        for part in selected
        if any((id(part.module), part.name, role) in headless for role in part.roles)
    ]
    if unknown:
        raise ConfigError(
            f"{verb.name}: per='head' and to='logits' need heads, and those of these weights are unknown:"
            f"\n{listed(unknown)}\n{heads_advice(verb, model_roles)}. Whole matrices need none"
        )


def _asked(where: Where | None) -> list[Asked]:
    parts: list[Any] = list(where) if isinstance(where, (list, tuple)) else [where]
    if parts and all(isinstance(part, (str, type)) for part in parts):
        return parts
    raise ConfigError(
        f"where={where!r}: expected a role such as 'query', a name, an fnmatch pattern, a 're:' pattern,"
        " a module type, or a non-empty list of these; 'layers' is every matrix of the layers"
    )


def _matching(asked: Asked, candidates: list[WeightSlice]) -> set[int]:
    """Return the ids of the matching candidates."""
    main = [part for part in candidates if part.is_main_weight]
    if isinstance(asked, type):
        return {id(part) for part in main if isinstance(part.module, asked)}
    # Parameter names only if no module path matches, or "layers.0*" would include biases.
    by_path = {id(part) for part in main if _names(asked, part.module_path, part.layer_path)}
    named = (part for part in candidates if _names(asked, part.parameter_name, part.label))
    return by_path or set(map(id, named))


def _names(pattern: str, *names: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return any(re.fullmatch(pattern.removeprefix("re:"), name) for name in names)
        except re.error as error:
            raise ConfigError(f"where={pattern!r} is not a regular expression: {error}") from error
    # The leading dot lets "*.q_proj" also match a top-level module "q_proj". `pattern in names` is
    # for names of parts, whose brackets are not meant as a pattern.
    forms = [form for name in names for form in (name, f".{name}")]
    return pattern in names or any(fnmatch.fnmatchcase(form, pattern) for form in forms)


def _no_match(part: Asked, candidates: list[WeightSlice]) -> str:
    matrices = [weight_slice for weight_slice in candidates if weight_slice.is_main_weight]
    if isinstance(part, str):
        paths = [weight_slice.module_path for weight_slice in matrices]
        near = nearest_names(part.removeprefix("re:").lstrip("*."), [*paths, *ROLE_NAMES, LAYERS])
        return (
            f"where={part!r} is no role, and matches no module with a weight and no parameter;"
            f" nearest: {', '.join(near)}"
        )
    classes = sorted({type(weight_slice.module).__name__ for weight_slice in matrices})
    kinds = ", ".join(classes) or "none"
    return f"where: no module with a weight is a {part.__name__}; types with one: {kinds}"
