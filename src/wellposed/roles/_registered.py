"""The names of all roles, and readers of weights whose role is none of a Transformer's own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TypeAlias

from torch import nn

from wellposed.errors import ConfigError
from wellposed.registry import Registry
from wellposed.roles._families import LocatedModule
from wellposed.roles._roles import ATTENTION, EMBEDDINGS, FEEDFORWARD, Roles, RoleWeight
from wellposed.roles._views import WeightView

ReadRole: TypeAlias = Callable[[LocatedModule], WeightView | None]
"""Function from a module to its weight that plays the role, or None."""
OF_TRANSFORMERS = (*ATTENTION, *FEEDFORWARD, "latent", "adapter", *EMBEDDINGS)
ROLES = Registry[ReadRole]("role", entry_points="wellposed.roles", taken=OF_TRANSFORMERS)


class RoleNames(Collection[str]):
    """The names of roles: those of Transformers, then those in `ROLES`, also later ones."""

    def __iter__(self) -> Iterator[str]:
        yield from OF_TRANSFORMERS
        yield from ROLES

    def __contains__(self, name: object) -> bool:
        return name in OF_TRANSFORMERS or name in ROLES

    def __len__(self) -> int:
        return len(OF_TRANSFORMERS) + len(ROLES.names())


ROLE_NAMES = RoleNames()
"""Every role that ``where=`` takes."""


def registered_weights(model: nn.Module, roles: Roles) -> Iterator[RoleWeight]:
    """Yield the weights that a reader of `ROLES` names; ``roles`` has those of Transformers."""
    readers = {name: ROLES.get(name) for name in ROLES}
    played = {weight.view.key: weight.role for weight in roles.weights()}
    for path, module in model.named_modules() if readers else ():
        located = LocatedModule(path, module, model)
        for name, read in readers.items():
            view = read(located)
            if view is None:
                continue
            other = played.get(view.key)
            if other is None:
                played[view.key] = name
                yield RoleWeight(name, located.stack, located.layer, path, view)
            elif other != name:
                raise ConfigError(
                    f"{view.label}: role {name!r} of wellposed.roles.ROLES, but it plays {other!r};"
                    " let the reader return None for it"
                )
