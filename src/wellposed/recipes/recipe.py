"""What a recipe is: one table or figure of a paper as a function, and the files it leaves; free of torch."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from wellposed.charts import Panel, draw
from wellposed.errors import ConfigError, unknown_name
from wellposed.measurement import write_csv
from wellposed.registry import Registry

Scale = Literal["toy", "mini", "paper"]
"""mini: minutes on two cores; paper: the paper's sizes; toy: seconds, for tests, too small to show anything."""
SCALES: tuple[Scale, ...] = get_args(Scale)


def _silent(line: str) -> None:
    del line


@dataclass(frozen=True)
class Request:
    """What a recipe is asked for."""

    scale: Scale
    out: Path
    """Folder for runs that the recipe trains; its own files are written by `reproduce`."""
    data: str | None = None
    """Data of the recipe's task; its own where not given."""
    announce: Callable[[str], None] = _silent
    """Called with one line now and then."""

    def pick(self, *, toy: Any, mini: Any, paper: Any) -> Any:
        """Return the value for this scale."""
        return {"toy": toy, "mini": mini, "paper": paper}[self.scale]


@dataclass(frozen=True)
class Reproduction:
    """What came out: the rows of the table or figure, and what the paper says beside what we got."""

    rows: Sequence[Mapping[str, Any]]
    panels: Sequence[Panel]
    got: str
    """What we found, with its numbers, to be put beside the paper's claim."""
    holds: bool | None
    """Whether the claim holds at this scale; None where this scale cannot say."""
    notes: tuple[str, ...] = ()
    """How this differs from the paper's experiment."""


@dataclass(frozen=True)
class Recipe:
    """One table or figure."""

    summary: str
    says: str
    """What the paper says."""
    minutes: Mapping[str, float]
    """Minutes it takes by scale: mini on two CPU cores, paper on one large GPU (estimated)."""
    function: str
    """``module:function`` in ``wellposed.recipes``, a function of a `Request`; imported when it is needed."""

    def __call__(self, request: Request) -> Reproduction:
        """Run the recipe."""
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(f"wellposed.recipes.{module}"), name)(request)


RECIPES: Registry[Recipe] = Registry("recipe")


@dataclass(frozen=True)
class Reproduced:
    """A finished recipe and its files."""

    name: str
    scale: Scale
    says: str
    result: Reproduction
    seconds: float
    files: tuple[Path, ...] = field(default=())

    def row(self) -> str:
        """Return the row: paper says / we got."""
        verdict = {True: "holds", False: "DOES NOT HOLD", None: "cannot be said at this scale"}[self.result.holds]
        lines = [f"{self.name} (scale {self.scale}, {self.seconds:.0f} s)", f"  paper says: {self.says}"]
        lines += [f"  we got:     {self.result.got}", f"  verdict:    {verdict}"]
        return "\n".join([*lines, *(f"  note:       {note}" for note in self.result.notes)])


def reproduce(
    name: str,
    *,
    scale: Scale = "mini",
    out: Path,
    data: str | None = None,
    announce: Callable[[str], None] = _silent,
) -> Reproduced:
    """Make one table or figure of a paper: ``<name>.csv``, ``<name>.svg`` and ``<name>.json`` in ``out``.

    Status: empirical; the JSON holds what the paper says, what we got and whether the claim held at this scale.

    Args:
        name: of a recipe, for instance ``kim2021/figure-2``.
        scale: ``"mini"`` (minutes on two cores) or ``"paper"``; ``"toy"`` is for tests.
        out: folder; created. Training recipes keep their runs inside and go on with them when called again.
        data: data of the recipe's task, for recipes that train.
        announce: called with one line of progress now and then.

    Raises:
        ConfigError: an unknown recipe (nearest three named) or scale.

    Cost: the minutes that ``RECIPES.get(name).minutes`` states.
    """
    recipe = RECIPES.get(name)
    if scale not in SCALES:
        raise unknown_name("scale", str(scale), SCALES)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out}: is a file; --out names a folder")
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    result = recipe(Request(scale, out, data, announce))
    seconds = time.perf_counter() - started
    stem = out / name.replace("/", "-")
    files = tuple(stem.with_name(stem.name + suffix) for suffix in (".csv", ".svg", ".json"))
    done = Reproduced(name, scale, recipe.says, result, seconds, files)
    write_csv(files[0], list(dict.fromkeys(name for row in result.rows for name in row)), result.rows)
    draw(result.panels, files[1])
    _write_json(files[2], done)
    return done


def _write_json(path: Path, done: Reproduced) -> None:
    values = {
        "recipe": done.name,
        "scale": done.scale,
        "paper_says": done.says,
        "we_got": done.result.got,
        "holds": done.result.holds,
        "notes": list(done.result.notes),
        "seconds": round(done.seconds, 1),
    }
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
