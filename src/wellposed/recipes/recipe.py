"""What a recipe is: one table or figure of a paper as a function of a `Request`; free of torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from wellposed.charts import Panel
from wellposed.errors import ConfigError

Scale = Literal["toy", "mini", "paper"]
"""mini: minutes on two cores; paper: the paper's sizes; toy: seconds, for tests, too small to show anything."""
SCALES: tuple[Scale, ...] = get_args(Scale)


def say_nothing(line: str) -> None:
    """Take a line of progress that nobody reads."""
    del line


@dataclass(frozen=True)
class Request:
    """What a recipe is asked for."""

    scale: Scale
    out: Path
    """Folder for runs that the recipe trains; its own files are written by `reproduce`."""
    data: str | None = None
    """Data of the recipe's task; its own where not given."""
    announce: Callable[[str], None] = say_nothing
    """Called with one line now and then."""
    encoder: str | None = None
    """Folder or hub name of a pretrained encoder, for recipes that fine-tune one."""
    jobs: int | None = None
    """Processes that train independent runs at the same time; where not given one, or as many as a recipe takes."""

    def pick(self, *, toy: Any, mini: Any, paper: Any) -> Any:
        """Return the value for this scale."""
        return {"toy": toy, "mini": mini, "paper": paper}[self.scale]

    def runs(self, group: str) -> Path:
        """Return the folder of a group of runs, which the recipes that share them name alike."""
        return self.out / "runs" / f"{group}-{self.scale}"


@dataclass(frozen=True)
class Criterion:
    """What decides a verdict."""

    test: str
    """When the claim counts as confirmed, in words."""
    seeds: int = 0
    """Trainings behind each number; 0 where nothing is drawn."""
    uncertainty: str = "none: nothing is drawn"
    """How sure the numbers are."""


@dataclass(frozen=True)
class Reproduction:
    """What came out: the rows of the table or figure, and what the paper says beside what we got."""

    rows: Sequence[Mapping[str, Any]]
    panels: Sequence[Panel]
    got: str
    """What we found, with its numbers, to be put beside the paper's claim."""
    holds: bool | None
    """Whether the claim holds at this scale; None where this scale cannot say, as the toy scale never can."""
    notes: tuple[str, ...] = ()
    """How this differs from the paper's experiment."""
    criterion: Criterion | None = None
    """What decided; a verdict without one is refused."""

    def __post_init__(self) -> None:
        if self.holds is not None and self.criterion is None:
            raise ConfigError(
                f"Reproduction: holds={self.holds} without a criterion; name the test in words, the seeds and the "
                "uncertainty, or leave holds=None"
            )


@dataclass(frozen=True)
class Recipe:
    """One table or figure: a row of a paper's catalogue."""

    name: str
    """``paper/item``."""
    summary: str
    says: str
    """What the paper says."""
    function: str | Callable[[Request], Reproduction]
    """A function of a `Request`, or ``module:function`` in ``wellposed.recipes``, imported when it is needed."""
    minutes: Mapping[str, float]
    """Minutes it takes by scale: mini on two CPU cores, paper on one large GPU (estimated)."""
    folders: tuple[str, ...] = ()
    """Where its data lies in a folder of many data sets, the first that is there; empty where that folder is read."""
    takes_encoder: bool = False
    """Whether it fine-tunes the pretrained encoder of a request."""

    def __call__(self, request: Request) -> Reproduction:
        """Run the recipe."""
        if callable(self.function):
            return self.function(request)
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(f"wellposed.recipes.{module}"), name)(request)
