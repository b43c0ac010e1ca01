"""Every table and figure that can be made again, by name: ``kim2021/figure-2`` and so on; free of
torch.

A new recipe is one function of a `Request` with its claim in a decorator, in a package with an
entry point in the group ``wellposed.recipes``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from wellposed.errors import ConfigError, DataError, shortened, unknown_name
from wellposed.hub import hub_answers
from wellposed.measurement import write_csv
from wellposed_lab.charts import draw
from wellposed_lab.compare.runs import say_nothing
from wellposed_lab.training.folder.durable_files import replace_files
from wellposed_studies.recipe import (
    RECIPES,
    SCALES,
    VERDICTS,
    Recipe,
    Reproduction,
    Request,
    Scale,
    recipe_names,
)


def file_stem(name: str) -> str:
    """Return how the files of a recipe start.

    >>> file_stem("kim2021/figure-2")
    'kim2021-figure-2'
    """
    return name.replace("/", "-")


def _data_of(recipe: Recipe, data: str | None) -> str | None:
    """Return the recipe's data in a folder of many data sets, or what was given where it is no such
    folder."""
    if data is None or not Path(data).is_dir():
        return data
    return next(
        (str(Path(data) / item) for item in recipe.folders if (Path(data) / item).exists()), data
    )


def check_data(data: str | None) -> None:
    """Raise `DataError` at once where data is not there; of the hub, where that does not answer and
    HF_HUB_OFFLINE does not send us to the cache."""
    on_hub = data is not None and data.startswith("hf:")
    if data is not None and not on_hub and not Path(data).exists():
        raise DataError(f"--data {data}: no such file or folder; give a file, a folder or hf:NAME")
    if on_hub and not os.environ.get("HF_HUB_OFFLINE") and not hub_answers():
        raise DataError(
            f"--data {data}: the Hugging Face hub cannot be reached; go online, give a local folder,"
            " or set HF_HUB_OFFLINE=1 to read what is already cached"
        )


def _made_with() -> dict[str, Any]:
    """Return date, versions and machine; not the words of the command, whose paths are this
    machine's."""
    from wellposed_lab.training.folder.run_folder import environment

    found = environment([])
    packages = {name: found["packages"][name] for name in ("wellposed", "torch")}
    machine = ", ".join(found["gpus"]) or found["cpu"]
    return {"date": found["date"][:10], **packages, "machine": machine, "source": found["git_hash"]}


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
        lines = [
            f"{self.name} (scale {self.scale}, {self.seconds:.0f} s)",
            f"  paper says: {self.says}",
            f"  we got:     {self.result.got}",
            f"  verdict:    {VERDICTS[self.result.holds]}",
        ]
        if (criterion := self.result.criterion) is not None:
            seeds = criterion.seeds or "none"
            lines += [
                f"  test:       {criterion.test}",
                f"  seeds:      {seeds}; uncertainty: {criterion.uncertainty}",
            ]
        return "\n".join([*lines, *(f"  note:       {note}" for note in self.result.notes)])


def reproduce(
    name: str,
    *,
    scale: Scale = "mini",
    out: Path,
    data: str | None = None,
    announce: Callable[[str], None] = say_nothing,
    encoder: str | None = None,
    vectors: str | None = None,
    languages: str | None = None,
    jobs: int | None = None,
) -> Reproduced:
    """Make one table or figure of a paper: ``<name>.csv``, ``<name>.svg`` and ``<name>.json`` in
    ``out``.

    Status: empirical; the JSON holds what the paper says, what we got and whether the claim held at
    this scale.

    Args:
        name: of a recipe, for instance ``kim2021/figure-2``.
        scale: ``"mini"`` (minutes on two cores), ``"medium"`` (sized so that the claim can be seen
            or refuted: at most ten hours on two cores or 45 minutes on one large GPU) or
            ``"paper"``; ``"toy"`` is for tests and never says whether a claim holds.
        out: folder; created. Training recipes keep their runs inside and go on with them when
            called again.
        data: data of the recipe's task, for recipes that read some, or a folder of data sets that
            holds it; where not given, ``RECIPES.get(name).builtin`` says what is read.
        announce: called with one line of progress now and then.
        encoder: folder or hub name of a pretrained encoder, for recipes that fine-tune one
            (mcgrath2024) or score replies with it (zhang2021/table-4).
        vectors: file of word vectors (GloVe, word2vec), for recipes that score replies with them
            (zhang2021/table-4).
        languages: source and target, as ``"en,fr"``, for recipes that translate ``data``.
        jobs: processes that train independent runs at the same time; see `Request`.

    Raises:
        ConfigError: an unknown recipe (nearest three named) or scale, or data, an encoder, vectors
            or languages for a recipe that reads none.
        DataError: the data is not there, or its host cannot be reached.

    Cost: the minutes that ``RECIPES.get(name).minutes`` states.
    """
    recipe = RECIPES.get(name)
    if scale not in SCALES:
        raise unknown_name("scale", str(scale), SCALES)
    if scale not in ("toy", *recipe.minutes):
        raise ConfigError(
            f"{name}: has no {scale} scale, as nobody could wait for it; docs/paper_scale.md has the"
            f" settings of the papers; its scales: {', '.join(recipe.minutes)}"
        )
    given = {"data": data, "encoder": encoder, "vectors": vectors, "languages": languages}
    for option, value in given.items():
        if value is not None and option not in recipe.takes:
            able = [other for other in recipe_names() if option in RECIPES.get(other).takes]
            raise ConfigError(
                f"{name}: reads no {option}, received {option}={value!r}; leave it out; these do:"
                f" {shortened(able)}"
            )
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out}: is a file; --out names a folder")
    check_data(data)
    out.mkdir(parents=True, exist_ok=True)
    data = _data_of(recipe, data)
    builtin = f"no data given: {recipe.builtin}" if data is None and recipe.builtin else None
    if builtin is not None:
        announce(builtin)
    request = Request(scale, out, data, announce, encoder, vectors, languages, jobs)
    power = None if recipe.power is None else dict(recipe.power(request))
    stem = file_stem(name)
    started = time.perf_counter()
    result = recipe(request)
    seconds = time.perf_counter() - started
    if scale == "toy":
        result = replace(result, holds=None)
    if builtin is not None:
        result = replace(result, notes=(*result.notes, builtin))
    files = tuple(out / f"{stem}{suffix}" for suffix in (".csv", ".svg", ".json"))
    done = Reproduced(name, scale, recipe.says, result, seconds, files)
    words = {"data": "DATA", "encoder": "ENCODER", "vectors": "VECTORS", "languages": languages}
    options = [f" --{each} {word}" for each, word in words.items() if given[each] is not None]
    values = {
        "recipe": name,
        "scale": scale,
        "paper_says": recipe.says,
        "quoted": recipe.told("Quote"),
        "we_got": result.got,
        "holds": result.holds,
        "criterion": None if result.criterion is None else asdict(result.criterion),
        "power": power,
        "notes": list(result.notes),
        "seconds": round(done.seconds, 1),
        "data": None if data is None else Path(data).name or data,
        "command": f"wellposed reproduce {name} --scale {scale}{''.join(options)}",
        **({} if encoder is None else {"encoder": Path(encoder).name}),
        **({} if vectors is None else {"vectors": Path(vectors).name}),
        "made_with": _made_with(),
        "protocol": recipe.protocol(scale),
    }
    with replace_files(out) as there:
        table, figure, claim = (there / file.name for file in files)
        columns = list(dict.fromkeys(column for row in result.rows for column in row))
        write_csv(table, columns, result.rows)
        draw(result.panels, figure)
        claim.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return done
