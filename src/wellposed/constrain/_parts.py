"""What the roles of a model say of its parameters: which rows play which part, and where weights
are fused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn

from wellposed.errors import RoleNotFoundError, WellposedError, unknown_name
from wellposed.roles import ROLE_NAMES, RoleWeight, find_roles


@dataclass(frozen=True)
class Part:
    """Rows of a weight, in (out, in) orientation, and the roles they play; None means all rows."""

    rows: tuple[int, int] | None
    transposed: bool
    roles: frozenset[str]


class Parts:
    """The parts of every weight with a role, by owning module and attribute."""

    def __init__(self, model: nn.Module) -> None:
        self.problem: WellposedError | None = None
        self.by_place: Mapping[tuple[int, str], tuple[Part, ...]] = {}
        try:
            weights = list(find_roles(model).weights())
        except WellposedError as error:
            # No model needs roles to be selected from by name; whoever asks for a role is told.
            self.problem = error
            return
        places: dict[tuple[int, str], list[RoleWeight]] = {}
        for weight in weights:
            places.setdefault((id(weight.view.owner), weight.view.attribute), []).append(weight)
        self.by_place = {place: _parts(group) for place, group in places.items()}

    def of(self, module: nn.Module, name: str) -> tuple[Part, ...]:
        """Return the parts of a weight: more than one where it is fused, none where it plays no
        role."""
        return self.by_place.get((id(module), name), ())

    def check(self, wanted: Collection[str]) -> None:
        """Raise for a name that is no role, and for a role that no weight of the model plays."""
        for role in wanted:
            if role not in ROLE_NAMES:
                raise unknown_name("role", role, ROLE_NAMES)
        if wanted and self.problem is not None:
            raise self.problem
        known = set().union(*(part.roles for parts in self.by_place.values() for part in parts))
        missing = [role for role in wanted if role not in known]
        if missing:
            have = ", ".join(role for role in ROLE_NAMES if role in known)
            raise RoleNotFoundError(
                f"no weight of the model plays the role {', '.join(missing)}; it has {have}"
            )


def _parts(weights: list[RoleWeight]) -> tuple[Part, ...]:
    roles: dict[tuple[int, int] | None, set[str]] = {}
    for weight in weights:
        roles.setdefault(weight.view.rows, set()).add(weight.role)
    transposed = weights[0].view.transposed
    slices = sorted(rows for rows in roles if rows is not None)
    whole = frozenset().union(*roles.values())
    if None in roles or not slices or not _cover(slices, weights[0]):
        return (Part(None, transposed, whole),)
    return tuple(Part(rows, transposed, frozenset(roles[rows])) for rows in slices)


def _cover(slices: list[tuple[int, int]], weight: RoleWeight) -> bool:
    """Tell whether the slices follow each other from the first row to the last."""
    shape = weight.view.parameter.shape
    starts = [start for start, _ in slices]
    ends = [end for _, end in slices]
    return [*starts, shape[-1 if weight.view.transposed else 0]] == [0, *ends]
