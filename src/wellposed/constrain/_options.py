"""The options of `constrain_`: which set, and which numbers belong to it."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

from wellposed.errors import ConfigError, unknown_name

Set: TypeAlias = Literal["orthogonal", "spectral", "columns"]


def check_options(
    *, to: str, bound: float, gain: float | str | None, weight_decay: str, embeddings: str
) -> None:
    """Raise for values out of range, and for an option that the set does not read."""
    if to not in get_args(Set):
        raise unknown_name("set (to=)", str(to), get_args(Set))
    if not _is_size(bound):
        raise ConfigError(f"constrain_: bound must be above 0 and finite, received {bound!r}")
    if not (gain is None or gain == "fit" or _is_size(gain)):
        raise ConfigError(
            f"constrain_: gain must be above 0 and finite, or 'fit', received {gain!r}"
        )
    if weight_decay not in ("refuse", "ignore"):
        raise ConfigError(
            f"constrain_: weight_decay must be 'refuse' or 'ignore', received {weight_decay!r}"
        )
    if embeddings not in ("refuse", "fit"):
        raise ConfigError(
            f"constrain_: embeddings must be 'refuse' or 'fit', received {embeddings!r}"
        )
    if to == "orthogonal" and bound != 1.0:
        raise ConfigError(
            f"constrain_: to='orthogonal' has no bound, received {bound!r}; its singular value is"
            " gain="
        )
    if to != "orthogonal":
        given = {
            "gain": gain not in (None, 1.0),
            "weight_decay": weight_decay != "refuse",
            "embeddings": embeddings != "refuse",
        }
        foreign = [name for name, is_given in given.items() if is_given]
        if foreign:
            raise ConfigError(
                f"constrain_: {', '.join(foreign)} belongs to to='orthogonal', received with"
                f" to={to!r}; its number is bound="
            )


def _is_size(value: object) -> bool:
    return isinstance(value, (int, float)) and 0.0 < value < math.inf
