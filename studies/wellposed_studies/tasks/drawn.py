"""Options of tasks that draw their data, and different rows by rejection."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from wellposed.errors import ConfigError
from wellposed.options import Size
from wellposed_lab.tasks.data.splits import SPLITS, DataOptions, Split, given_options

Hashed = TypeVar("Hashed", bound=Hashable)


@dataclass(frozen=True)
class SeededOptions(DataOptions):
    """Where the data of a task is, if it can be drawn."""

    data: str = "builtin"
    """builtin, a file, a folder, or hf:name[:config]."""
    data_seed: int | None = None
    """Seed of the drawing, apart from the seed of training; 0 if not given."""

    drawn: ClassVar[str] = "data_seed"
    """Names of options that say what is drawn for builtin, and have no effect on files."""

    def problems(self) -> list[str]:
        """Return one line for each option that would not be read."""
        unread = given_options(self, self.drawn.split() if self.data != "builtin" else ())
        why = f"says what is drawn, no effect on {self.data}"
        return [*super().problems(), *(f"option {name}: {why}" for name in unread)]


@dataclass(frozen=True)
class DrawnOptions(SeededOptions):
    """Where the data of a task is, and how much is drawn."""

    num_train: Size | None = None
    """Train examples that are drawn; the usual number if not given."""
    num_valid: Size | None = None
    """Valid examples that are drawn; the usual number if not given."""
    num_test: Size | None = None
    """Test examples that are drawn; the usual number if not given."""

    drawn: ClassVar[str] = "num_train num_valid num_test data_seed"

    def counts(self, usual: Mapping[Split, int | None]) -> dict[Split, Any]:
        """Return how many examples of each split are drawn."""
        return {split: getattr(self, f"num_{split}") or usual[split] for split in SPLITS}


def draw_distinct(
    draw: Callable[[], Hashed], count: int, tries: int, few: str, remedy: str
) -> list[Hashed]:
    """Return ``count`` different results of ``draw``.

    Raises:
        ConfigError: after ``tries`` known ones in a row; it says what gives too ``few``, and the
            ``remedy``.
    """
    drawn: dict[Hashed, None] = {}
    fruitless = 0
    while len(drawn) < count:
        before = len(drawn)
        drawn.setdefault(draw())
        fruitless = fruitless + 1 if len(drawn) == before else 0
        if fruitless > tries:
            raise ConfigError(
                f"{few}: {before} found, {count} wanted; lower num_train, num_valid and num_test,"
                f" or {remedy}"
            )
    return list(drawn)
