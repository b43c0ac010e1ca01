"""Decide, for every matrix of a model, what will be done to it; nothing is changed here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from wellposed.errors import ConfigError, RoleNotFoundError, listed, nearest_names
from wellposed.initialize._norms import is_layer_norm, matches
from wellposed.roles import EmbeddingRole, Roles, WeightView

Draw = Literal["xavier_uniform", "xavier_normal", "embedding", "kept"]
UNSCALED_ROLES = ("query", "key")
SCALED_ROLES = ("value", "output", "feedforward_in", "feedforward_out")
_LINEAR = ("Conv1D",)  # GPT-2's linear layer, which stores (in, out)


@dataclass(frozen=True)
class Step:
    """One weight, how it is drawn, and the factor that follows."""

    role: str
    stack: str | None
    layer: int | None
    view: WeightView
    draw: Draw
    factor: float
    padding_index: int | None = None


def layer_steps(roles: Roles, factors: Mapping[str, float], draw: Draw) -> list[Step]:
    """Return the steps of the weights inside the layers; ``factors`` is by path of the role.

    Raises:
        ConfigError: a gated feed-forward network, or one weight that plays two roles.
    """
    gated = [network.path for network in roles.feedforward if network.gate is not None]
    if gated:
        raise ConfigError(
            "a gated feed-forward network is a product of three weights, for which neither paper"
            " has a factor; use a plain one, or a model with norms:\n" + listed(gated)
        )
    steps: dict[object, Step] = {}
    clashes: list[str] = []
    for weight in roles.weights():
        if weight.role not in (*UNSCALED_ROLES, *SCALED_ROLES):
            continue
        factor = factors[weight.path] if weight.role in SCALED_ROLES else 1.0
        step = Step(weight.role, weight.stack, weight.layer, weight.view, draw, factor)
        first = steps.setdefault(weight.view.key, step)
        if first.factor != step.factor:
            clashes.append(f"{weight.view.parameter_name}: {first.role} and {step.role}")
    if clashes:
        raise ConfigError("one weight plays two roles with different factors:\n" + listed(clashes))
    return list(steps.values())


def embedding_steps(model: nn.Module, roles: Roles, factors: Mapping[str, float]) -> list[Step]:
    """Return one step for each embedding table, tied ones once; ``factors`` has encoder's and
    decoder's.

    A table that is used outside the decoder too is shared, and takes the encoder's factor. Frozen
    tables (sinusoids) are left alone.
    """
    owners: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Embedding):
            owners.setdefault(id(module.weight), []).append(path)
    tables = list(roles.embeddings)
    known = {id(table.weight.parameter) for table in tables}
    steps: list[Step] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and id(module.weight) not in known:
            known.add(id(module.weight))
            tables.append(EmbeddingRole(path, "token", WeightView(path, module, "weight")))
    named = {id(table.weight.parameter): f"{table.kind}_embedding" for table in roles.embeddings}
    for table in tables:
        parameter = table.weight.parameter
        places = owners.get(id(parameter), [table.path])
        stack = (
            "decoder"
            if all("decoder" in place for place in places) and "decoder" in factors
            else "encoder"
        )
        role = named.get(id(parameter), "embedding")
        if not parameter.requires_grad:
            steps.append(Step(role, None, None, table.weight, "kept", 1.0))
            continue
        padding = getattr(table.weight.owner, "padding_idx", None)
        steps.append(Step(role, None, None, table.weight, "embedding", factors[stack], padding))
    return steps


def head_steps(model: nn.Module, done: Sequence[Step], inside: Sequence[str]) -> list[Step]:
    """Return the steps of linear layers outside the layers: Xavier, factor 1; an untied output
    layer N(0, 1 / d)."""
    known = {id(step.view.parameter) for step in done}
    getter: Any = getattr(model, "get_output_embeddings", None)
    output = getter() if callable(getter) else None
    steps: list[Step] = []
    for path, module in model.named_modules():
        linear = isinstance(module, nn.Linear) or type(module).__name__ in _LINEAR
        if not linear or _is_inside(path, inside) or id(module.weight) in known:
            continue
        known.add(id(module.weight))
        view = WeightView(path, module, "weight", transposed=type(module).__name__ in _LINEAR)
        role, draw = (
            ("output_embedding", "embedding") if module is output else ("other", "xavier_uniform")
        )
        steps.append(Step(role, None, None, view, draw, 1.0))
    return steps


def leave_alone(
    model: nn.Module, roles: Roles, steps: Sequence[Step], leave: Sequence[str]
) -> list[Step]:
    """Return the steps; those of roles and of parameters that ``leave`` names draw nothing.

    Raises:
        ConfigError: a name that is no role of the model and matches no parameter (nearest three
        named).
    """
    # A weight may have several names and play several roles: any of them will do.
    named = list(model.named_parameters(remove_duplicate=False))
    played = [
        *((weight.role, weight.view.key) for weight in roles.weights()),
        *((s.role, s.view.key) for s in steps),
    ]
    known = [*dict.fromkeys(role for role, _ in played), *(name for name, _ in named)]
    unknown = [
        f"{entry!r}; nearest: {', '.join(nearest_names(entry, known))}"
        for entry in leave
        if entry not in known and not any(matches(name, [entry]) for name, _ in named)
    ]
    if unknown:
        raise ConfigError(
            "leave: expected roles or patterns on parameter names, received\n" + listed(unknown)
        )
    parameters = {id(parameter) for name, parameter in named if matches(name, leave)}
    weights = {key for role, key in played if role in leave}
    return [
        (
            replace(step, draw="kept", factor=1.0)
            if step.view.key in weights or id(step.view.parameter) in parameters
            else step
        )
        for step in steps
    ]


def check_steps(
    model: nn.Module, steps: Sequence[Step], leave: Sequence[str], where: str = ""
) -> None:
    """Refuse a model with matrices that no step covers, frozen, parametrized or without numbers.

    Raises:
        RoleNotFoundError: weights that match nothing, all of them listed.
        ConfigError: weights that cannot be written.
    """
    known = {id(step.view.parameter) for step in steps}
    unmatched = [
        f"{name} {tuple(parameter.shape)}"
        for name, parameter in _matrices(model)
        if id(parameter) not in known and not matches(name, leave)
    ]
    parametrized = [
        step.view.parameter_name
        for step in steps
        if ".parametrizations." in f".{step.view.parameter_name}"
    ]
    if parametrized:
        raise ConfigError(
            "parametrized weights cannot be drawn; initialise before the parametrization is"
            " registered:\n" + listed(parametrized)
        )
    if unmatched:
        raise RoleNotFoundError(
            f"{where or type(model).__name__}: {len(unmatched)} weights match no role, so the rule"
            f" does not say what to do with them:\n{listed(unmatched)}\nname their role with"
            " patterns= (see find_roles), or leave them as they are with leave='...' (roles, or"
            " shell-style patterns on parameter names)"
        )
    drawn = [step for step in steps if step.draw != "kept"]
    frozen = [step.view.parameter_name for step in drawn if not step.view.parameter.requires_grad]
    if frozen:
        raise ConfigError(
            "frozen weights (requires_grad=False) would keep these random numbers for good;"
            " unfreeze them, or give the new layers to dt_fixup_:\n" + listed(frozen)
        )
    empty = [step.view.parameter_name for step in drawn if step.view.parameter.is_meta]
    if empty:
        raise ConfigError(
            "weights on the meta device hold no numbers; materialise the model first:\n"
            + listed(empty)
        )


def _matrices(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters with at least two dimensions, those of norms left out."""
    norms = tuple(
        f"{path}." for path, module in model.named_modules() if path and is_layer_norm(module)
    )
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and not name.startswith(norms):
            yield name, parameter


def _is_inside(path: str, inside: Sequence[str]) -> bool:
    return any(not layer or path == layer or path.startswith(f"{layer}.") for layer in inside)
