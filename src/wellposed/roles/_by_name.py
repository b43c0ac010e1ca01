"""Roles that names of modules and their children tell; nothing runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from wellposed.errors import ShapeError, WellposedError
from wellposed.roles._families import (
    FAMILIES,
    LocatedModule,
    OtherAttentionError,
    Reader,
    Role,
    UnknownHeadsError,
    first_of,
)
from wellposed.roles._live import wrapped_by
from wellposed.roles._roles import AttentionRole, Roles, RoleWeight, views_of
from wellposed.roles._views import WeightView


def roles_by_name(model: nn.Module, problems: dict[str, WellposedError]) -> Roles:
    """Return roles found by names; ``problems`` gets why a module cannot be read, by path."""
    families = [FAMILIES.get(name) for name in FAMILIES]
    attention_of = first_of(*(family.attention for family in families))
    network_of = first_of(*(family.feedforward for family in families))

    loose: list[RoleWeight] = []
    paths = dict(model.named_modules(remove_duplicate=False))

    def are_inside(views: Iterable[WeightView]) -> bool:
        # PEFT's models pass on every attribute of the model inside, which is read by itself.
        return all(paths.get(view.owner_path) is view.owner for view in views)

    def read(reader: Reader[Role], located: LocatedModule) -> Role | None:
        try:
            role = reader(located)
        except WellposedError as error:
            if isinstance(error, UnknownHeadsError):
                loose.extend(weight for weight in error.weights if are_inside([weight.view]))
            problems[located.path] = error
            return None
        return role if role is None or are_inside(views_of(role).values()) else None

    # A wrapper passes on the attributes of its module, and would be read as that a second time.
    named = ((path, part) for path, part in model.named_modules() if wrapped_by(part) is None)
    modules = [LocatedModule(path, module, model) for path, module in named]
    attention: dict[str, AttentionRole] = {}
    for located in modules:
        inside = not attention.keys().isdisjoint(prefixes(located.path))
        if not inside and (role := read(attention_of, located)):
            attention[role.path] = role
    around = attention.keys() | {weight.path for weight in loose}
    outside = (located for located in modules if around.isdisjoint(prefixes(located.path)))
    networks = (network for located in outside if (network := read(network_of, located)))
    return Roles(tuple(attention.values()), tuple(networks), loose=tuple(loose))


def other_kinds_taken(problems: dict[str, WellposedError]) -> dict[str, str]:
    """Take attention of another kind out of the problems, as the rest of the model is known."""
    others = {path: e for path, e in problems.items() if isinstance(e, OtherAttentionError)}
    for path in others:
        del problems[path]
    return {path: str(error) for path, error in others.items()}


def unread_by_name(problems: dict[str, WellposedError]) -> list[str]:
    """Return a note on each module whose heads the names do not tell; raise what else is wrong."""
    for problem in problems.values():
        if not isinstance(problem, ShapeError):
            raise problem
    return [
        f"{'no heads' if isinstance(problem, UnknownHeadsError) else 'no role'}: {problem}"
        for problem in problems.values()
    ]


def prefixes(path: str) -> Iterator[str]:
    """Yield a path and those of all modules around it, from the inside out."""
    parts = path.split(".")
    return (".".join(parts[:end]) for end in range(len(parts), 0, -1))
