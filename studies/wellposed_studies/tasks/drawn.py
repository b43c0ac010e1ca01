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
    """Options of a task whose data can be generated."""

    data: str = "builtin"
    """builtin, a file, a folder, or hf:name[:config]."""
    data_seed: int | None = None
    """Seed of the drawing, apart from the seed of training; 0 if not given."""

    drawn: ClassVar[str] = "data_seed"
    """Options of the generator, which have no effect on files."""

    def problems(self) -> list[str]:
        """Return one line for each option that would be ignored."""
        unread = given_options(self, self.drawn.split() if self.data != "builtin" else ())
        why = f"says what is drawn, no effect on {self.data}"
        return [*super().problems(), *(f"option {name}: {why}" for name in unread)]


@dataclass(frozen=True)
class DrawnOptions(SeededOptions):
    """Options of a task that generates a given number of examples."""

    num_train: Size | None = None
    """Train examples that are drawn; the usual number if not given."""
    num_valid: Size | None = None
    """Valid examples that are drawn; the usual number if not given."""
    num_test: Size | None = None
    """Test examples that are drawn; the usual number if not given."""

    drawn: ClassVar[str] = "num_train num_valid num_test data_seed"

    def counts(self, usual: Mapping[Split, int | None]) -> dict[Split, Any]:
        """Return the number of examples to draw for each split."""
        return {split: getattr(self, f"num_{split}") or usual[split] for split in SPLITS}


def drawn_facts(source: str, version: int, seed: int, digest: Any, **others: Any) -> dict[str, Any]:
    """Return what a run records of drawn data; ``others`` are further entries."""
    facts = {"source": f"builtin: {source}", "generator_version": version, "data_seed": seed}
    return {**facts, **others, "sha256": digest}


def draw_distinct(
    draw: Callable[[], Hashed], count: int, tries: int, few: str, remedy: str
) -> list[Hashed]:
    """Return ``count`` different draws; `ConfigError` after ``tries`` repetitions in a row."""
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
