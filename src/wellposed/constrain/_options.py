"""The options of `constrain_` that give a set its size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from wellposed.errors import ConfigError
from wellposed.options import Positive, fits

Set: TypeAlias = (
    Literal[
        "orthogonal", "spectral", "spectral_soft", "spectral_hammer", "spectral_sphere", "columns",
        "rows", "hypersphere", "logits",
    ]
    | str
)  # fmt: skip
"""One of these, or a name registered in `SETS`."""
LOGITS = "logits"
"""The value of ``to=`` that is no set of matrices: it scales heads by the logits of passes."""


@dataclass(frozen=True)
class SetOptions:
    """The options of `constrain_` from which sets make their sizes."""

    bound: float | str | None = None
    gain: float | Literal["fit"] | None = None
    embeddings: Literal["refuse", "fit"] = "refuse"
    is_pretrained: bool = False
    """Whether the model has trained weights, which ``gain`` fits by default."""

    def changed(self) -> list[str]:
        """Return the names of the options that are not as by default."""
        is_changed = {
            "bound": self.bound not in (None, 1.0),
            "gain": self.gain not in (None, 1.0),
            "embeddings": self.embeddings != "refuse",
        }
        return [name for name, changed in is_changed.items() if changed]


def refuse_options(to: Set, names: Sequence[str]) -> None:
    """Raise `ConfigError` if options were given that this set does not read."""
    if names:
        raise ConfigError(
            f"constrain_: to={to!r} has no {', '.join(names)}; the size of the set is gain= for"
            " to='orthogonal', else bound="
        )


def check_length(bound: float | str | None) -> None:
    """Raise `ConfigError` unless a bound is left out or is a finite number above 0."""
    is_number = isinstance(bound, (int, float)) and fits(bound, Positive)
    if bound is not None and not is_number:
        raise ConfigError(
            f"constrain_: bound = {bound!r}, expected a finite number > 0, or such as 'rms:1' for"
            " to='spectral'"
        )
