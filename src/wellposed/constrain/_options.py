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
    choices = {
        "set (to=)": (to, get_args(Set)),
        "weight_decay": (weight_decay, ("refuse", "ignore")),
        "embeddings": (embeddings, ("refuse", "fit")),
    }
    for name, (given, allowed) in choices.items():
        if given not in allowed:
            raise unknown_name(name, str(given), allowed)
    if not _is_size(bound):
        raise ConfigError(f"constrain_: bound must be above 0 and finite, received {bound!r}")
    if not (gain is None or gain == "fit" or _is_size(gain)):
        raise ConfigError(
            f"constrain_: gain must be above 0 and finite, or 'fit', received {gain!r}"
        )
    if to == "orthogonal":
        foreign = {"bound": bound != 1.0}
    else:
        foreign = {
            "gain": gain not in (None, 1.0),
            "weight_decay": weight_decay != "refuse",
            "embeddings": embeddings != "refuse",
        }
    if any(foreign.values()):
        names = ", ".join(name for name, is_given in foreign.items() if is_given)
        raise ConfigError(
            f"constrain_: to={to!r} has no {names}; the size of the set orthogonal is gain=, that of"
            " the others bound="
        )


def _is_size(value: object) -> bool:
    return isinstance(value, (int, float)) and 0.0 < value < math.inf
