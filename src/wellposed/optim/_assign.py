"""Which ball each parameter of a model belongs to, by its role; what has none is refused by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from wellposed.errors import ConfigError, listed
from wellposed.linalg import is_sharded
from wellposed.model_checks import require_module
from wellposed.optim._balls import BALLS, ball_named
from wellposed.optim._layout import WHOLE, Piece, pieces_by_role
from wellposed.roles import Roles, Verb, find_roles_for, is_table, is_transposed, unwrapped

SCION = Verb("Scion", "Scion(model, batch=batch)", "Scion(model, norms={PATTERN: 'spectral', ...})")


class Assigned(NamedTuple):
    """One parameter with its ball."""

    name: str
    parameter: nn.Parameter
    norm: str
    kind: str
    """``"hidden"``, ``"head"``, ``"embedding"`` or ``"vector"``: which radius it has."""
    pieces: tuple[Piece, ...]


class _Facts(NamedTuple):
    """Parts of a model that the rules below look up."""

    hidden: Mapping[nn.Parameter, tuple[Piece, ...]]
    tables: frozenset[int]
    heads: frozenset[int]
    owners: Mapping[int, tuple[str, nn.Module]]


def assigned(model: nn.Module, norms: Mapping[str, str], batch: Any) -> list[Assigned]:
    """Return every trainable parameter with its ball.

    Raises:
        ConfigError: parameters without a ball, in shards, or patterns that match nothing.
        RoleNotFoundError: no attention or feed-forward weight was recognised.
    """
    require_module("Scion", model)
    model = unwrapped(model)
    named = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    _check(named, norms)

    facts = _facts_of(model, find_roles_for(SCION, model, batch))
    rows = [_row(name, weight, norms, facts) for name, weight in named.items()]
    homeless = [
        f"{name} {tuple(weight.shape)}"
        for (name, weight), row in zip(named.items(), rows, strict=True)
        if row is None
    ]
    if homeless:
        raise ConfigError(
            "Scion: these parameters are no matrix, stack of experts, embedding or vector that it"
            " recognises, so they have no norm ball; name one, as norms={'"
            f"{homeless[0].partition(' ')[0]}': 'spectral'}}, or freeze them and step them by another"
            f" optimizer:\n{listed(homeless)}"
        )
    return [row for row in rows if row is not None]


def _check(named: Mapping[str, nn.Parameter], norms: Mapping[str, str]) -> None:
    if not named:
        raise ConfigError("Scion: no parameter trains; unfreeze some")
    for pattern, norm in norms.items():
        ball_named(norm)
        if not fnmatch.filter(named, pattern):
            raise ConfigError(
                f"Scion: norms: {pattern!r} matches no parameter that trains, such as"
                f" {next(iter(named))!r}; give a name or an fnmatch pattern"
            )


def _facts_of(model: nn.Module, roles: Roles) -> _Facts:
    tables = {id(module.weight) for module in model.modules() if is_table(module)}
    for weight in roles.weights():
        if weight.role.endswith("_embedding"):
            tables.add(id(weight.view.parameter))

    output: Any = getattr(model, "get_output_embeddings", lambda: None)()
    heads = {id(getattr(output, "weight", None))} - {id(None)}
    owners: dict[int, tuple[str, nn.Module]] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                owners.setdefault(id(weight), (name, module))

    hidden = {
        weight: pieces
        for weight, pieces in pieces_by_role(roles).items()
        if id(weight) not in tables | heads
    }
    return _Facts(hidden, frozenset(tables), frozenset(heads), owners)


def _row(
    name: str, weight: nn.Parameter, norms: Mapping[str, str], facts: _Facts
) -> Assigned | None:
    """Return the ball of one parameter; None if it has none."""
    attribute, module = facts.owners[id(weight)]
    is_linear = weight.ndim == 2 and attribute == "weight" and not _is_norm(module)
    as_stored = (Piece(transposed=is_transposed(module)),)
    asked = [norm for pattern, norm in norms.items() if fnmatch.fnmatch(name, pattern)]
    if id(weight) in facts.heads:
        row = Assigned(name, weight, "sign", "head", as_stored)
    elif id(weight) in facts.tables:
        row = Assigned(name, weight, "vectors", "embedding", WHOLE)
    elif facts.hidden.get(weight):
        row = Assigned(name, weight, "spectral", "hidden", facts.hidden[weight])
    elif weight.ndim <= 1 or (weight.ndim == 2 and attribute.endswith("bias")):
        row = Assigned(name, weight, "rms", "vector", WHOLE)
    elif is_linear or (asked and weight.ndim == 2):
        row = Assigned(name, weight, "spectral", "hidden", as_stored)
    else:
        return None

    if not asked:
        return row
    if weight.ndim not in BALLS[asked[-1]].takes and facts.hidden.get(weight) is None:
        return None
    kind = "head" if asked[-1] == "sign" else row.kind
    return row._replace(norm=asked[-1], kind=kind)


def _is_norm(module: nn.Module) -> bool:
    """Whether a module multiplies entry by entry, so that its weight is no linear map."""
    return any(kind.__name__.rstrip("0123d").endswith("Norm") for kind in type(module).__mro__)


def check_parameter(label: str, parameter: Any, norm: str, *, is_stack: bool) -> None:
    """Raise `ConfigError` for a parameter that Scion cannot step in this ball."""
    takes = BALLS[norm].takes
    problem = ""
    if not parameter.is_floating_point():
        problem = f"is {parameter.dtype}; expected real floating numbers"
    elif is_sharded(parameter):
        problem = "is sharded; use DDP, or torch.optim.Muon, which gathers each matrix"
    elif parameter.ndim not in takes and not is_stack:
        problem = (
            f"has {parameter.ndim} dimensions, and norm {norm!r} takes {' or '.join(map(str, takes))};"
            " of a stack of experts, give the model, whose roles tell its matrices"
        )
    if problem:
        raise ConfigError(f"Scion: {label} {tuple(parameter.shape)} {problem}")
