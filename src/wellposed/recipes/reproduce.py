"""Every table and figure that can be made again, by name: ``kim2021/figure-2`` and so on; free of torch.

A new recipe is one function of a `Request` and one row of its paper's catalogue.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from wellposed.charts import draw
from wellposed.errors import ConfigError, unknown_name
from wellposed.measurement import write_csv
from wellposed.recipes import frontier, huang2020, kim2021, mcgrath2024, sengupta2023, zhang2021
from wellposed.recipes.recipe import SCALES, Criterion, Recipe, Reproduction, Request, Scale, say_nothing
from wellposed.registry import Registry

__all__ = ["RECIPES", "SCALES", "Criterion", "Recipe", "Reproduced", "Reproduction", "Request", "Scale", "reproduce"]

RECIPES: Registry[Recipe] = Registry("recipe")
for _paper in (huang2020, kim2021, mcgrath2024, sengupta2023, zhang2021, frontier):
    for _recipe in _paper.RECIPES:
        RECIPES.register(_recipe.name)(_recipe)


@dataclass(frozen=True)
class Reproduced:
    """A finished recipe and its files."""

    name: str
    scale: Scale
    says: str
    result: Reproduction
    seconds: float
    files: tuple[Path, ...] = ()

    def row(self) -> str:
        """Return the row: paper says / we got."""
        verdict = {True: "holds", False: "DOES NOT HOLD", None: "cannot be said at this scale"}[self.result.holds]
        lines = [f"{self.name} (scale {self.scale}, {self.seconds:.0f} s)", f"  paper says: {self.says}"]
        lines += [f"  we got:     {self.result.got}", f"  verdict:    {verdict}"]
        if (criterion := self.result.criterion) is not None:
            lines.append(f"  test:       {criterion.test}")
            lines.append(f"  seeds:      {criterion.seeds or 'none'}; uncertainty: {criterion.uncertainty}")
        return "\n".join([*lines, *(f"  note:       {note}" for note in self.result.notes)])


def reproduce(
    name: str,
    *,
    scale: Scale = "mini",
    out: Path,
    data: str | None = None,
    announce: Callable[[str], None] = say_nothing,
) -> Reproduced:
    """Make one table or figure of a paper: ``<name>.csv``, ``<name>.svg`` and ``<name>.json`` in ``out``.

    Status: empirical; the JSON holds what the paper says, what we got and whether the claim held at this scale.

    Args:
        name: of a recipe, for instance ``kim2021/figure-2``.
        scale: ``"mini"`` (minutes on two cores) or ``"paper"``; ``"toy"`` is for tests and never says whether a claim
            holds.
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
    if scale == "toy":
        result = replace(result, holds=None)
    stem = name.replace("/", "-")
    table, figure, claim = (out / f"{stem}{suffix}" for suffix in (".csv", ".svg", ".json"))
    done = Reproduced(name, scale, recipe.says, result, time.perf_counter() - started, (table, figure, claim))
    write_csv(table, list(dict.fromkeys(column for row in result.rows for column in row)), result.rows)
    draw(result.panels, figure)
    values = {
        "recipe": name,
        "scale": scale,
        "paper_says": recipe.says,
        "we_got": result.got,
        "holds": result.holds,
        "criterion": None if result.criterion is None else asdict(result.criterion),
        "notes": list(result.notes),
        "seconds": round(done.seconds, 1),
        "data": data,
    }
    claim.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return done
