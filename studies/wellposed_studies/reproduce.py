"""Reproduce tables and figures of papers by name, for instance ``kim2021/figure-2``; no torch.

A new recipe is a function of a `Request`, in a package with the entry point ``wellposed.recipes``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from wellposed.errors import ConfigError, DataError, shortened, unknown_name
from wellposed.hub import hub_answers
from wellposed.measurement import write_csv
from wellposed.options import Positive, fits
from wellposed_lab.charts import draw
from wellposed_lab.compare.runs import say_nothing
from wellposed_lab.training.folder.atomic import replace_files
from wellposed_studies.evidence import size_words, verdict_words
from wellposed_studies.recipe import (
    RECIPES,
    SCALES,
    Recipe,
    Reproduction,
    Request,
    Scale,
    recipe_names,
)
from wellposed_studies.rows import file_stem, finished
from wellposed_studies.run_history import leads, with_history


def _data_of(recipe: Recipe, data: str | None) -> str | None:
    """Return the data of a recipe, looked up in `data` if that is a folder of data sets."""
    if data is None or not Path(data).is_dir():
        return data
    return next(
        (str(Path(data) / item) for item in recipe.folders if (Path(data) / item).exists()), data
    )


def check_data(data: str | None) -> None:
    """Raise `DataError` if the data is missing or its hub does not answer (unless HF_HUB_OFFLINE)."""
    on_hub = data is not None and data.startswith("hf:")
    if data is not None and not on_hub and not Path(data).exists():
        raise DataError(f"--data {data}: no such file or folder; give a file, a folder or hf:NAME")
    if on_hub and not os.environ.get("HF_HUB_OFFLINE") and not hub_answers():
        raise DataError(
            f"--data {data}: the Hugging Face hub cannot be reached; go online, give a local folder,"
            " or set HF_HUB_OFFLINE=1 to read what is already cached"
        )


def _made_with() -> dict[str, Any]:
    """Return date, versions and machine; no command line, since its paths are local."""
    from wellposed_lab.training.folder.run_folder import environment

    facts = environment([])
    packages = {name: facts["packages"][name] for name in ("wellposed", "torch")}
    machine = ", ".join(facts["gpus"]) or facts["cpu"]
    return {"date": facts["date"][:10], **packages, "machine": machine, "source": facts["git_hash"]}


@dataclass(frozen=True)
class Reproduced:
    """A finished recipe and its files."""

    name: str
    scale: Scale
    claim: str
    result: Reproduction
    seconds: float
    files: tuple[Path, ...] = ()
    encoder: str | None = None
    leads: bool = True
    """Whether it decides the row in its folder; if not, a larger run there does."""

    def row(self) -> str:
        """Return the printed row: size, claim, result and verdict."""
        recipe = RECIPES.get(self.name)
        kind = recipe.kind(self.scale, self.encoder)
        size = self.result.size
        read = f": {size_words(size)}" if kind == "trained" else ""
        lines = [
            f"{self.name} (scale {self.scale}, {self.seconds:.0f} s){read}",
            *([f"  paper size: {size_words(recipe.paper_size)}"] if recipe.paper_size else []),
            f"  paper says: {self.claim}",
            f"  we got:     {self.result.got}",
            f"  verdict:    {verdict_words(kind, self.result.holds, size)}",
        ]
        if not self.leads:
            lines.append("  row:        decided by the larger run in this folder, as before")

        criterion = self.result.criterion
        if criterion is not None:
            seeds = criterion.seeds or "none"
            lines += [
                f"  test:       {criterion.test}",
                f"  seeds:      {seeds}; uncertainty: {criterion.uncertainty}",
            ]

        return "\n".join([*lines, *(f"  note:       {note}" for note in self.result.notes)])


def _checked_recipe(name: str, scale: str, inputs: Mapping[str, Any]) -> Recipe:
    """Return the recipe; `ConfigError` if it has no such scale or does not read an input."""
    recipe = RECIPES.get(name)
    if scale not in SCALES:
        raise unknown_name("scale", str(scale), SCALES)
    if scale not in ("toy", *recipe.minutes):
        raise ConfigError(
            f"{name}: has no {scale} scale, which would take too long; docs/paper_scale.md has"
            f" the papers' settings. Its scales: {', '.join(recipe.minutes)}"
        )

    for option, value in inputs.items():
        if value is not None and option not in recipe.takes:
            able = [other for other in recipe_names() if option in RECIPES.get(other).takes]
            raise ConfigError(
                f"{name}: reads no {option}, received {option}={value!r}; leave it out; these do:"
                f" {shortened(able)}"
            )

    return recipe


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
    minutes: float | None = None,
) -> Reproduced:
    """Reproduce a table or figure: write its csv, svg and json (claim, result, verdict) to ``out``.

    If ``out`` has a larger run of it, that run decides the row and keeps its files; this one is
    added to ``runs`` in the json.

    Status: empirical, at this scale. Cost: ``RECIPES.get(name).minutes``.

    Args:
        name: a recipe, for instance ``kim2021/figure-2``.
        scale: ``"mini"`` takes minutes on two cores. `"medium"` is enough to confirm or refute the
            claim, in at most ten hours on two cores or 45 minutes on one large GPU. `"paper"` has
            the paper's sizes. `"toy"` is for tests and has no verdict.
        out: folder, created if needed. Training runs are kept inside and resumed by later calls.
        data: its data, or a folder of data sets. `RECIPES.get(name).builtin` if None.
        announce: called with one line of progress at a time.
        encoder: pretrained encoder, to fine-tune (mcgrath2024) or to score (zhang2021/table-4).
        vectors: file of word vectors (GloVe, word2vec). They score replies (zhang2021/table-4).
        languages: source and target, as ``"en,fr"``, for recipes that translate ``data``.
        jobs: Processes that train independent runs in parallel, as in `Request`.
        minutes: Time after which no further training begins, for recipes of many hours. Their row
            is partial then, and a later call completes it.

    Raises:
        ConfigError: unknown recipe or scale, or an input that the recipe does not read.
        DataError: the data is missing, or its host cannot be reached.
    """
    inputs = {"data": data, "encoder": encoder, "vectors": vectors, "languages": languages}
    all_inputs = {**inputs, "minutes": minutes}
    recipe = _checked_recipe(name, scale, all_inputs)
    if minutes is not None and not fits(minutes, Positive):
        raise ConfigError(f"minutes = {minutes!r:.80}, expected a finite number > 0")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out}: is a file; --out names a folder")

    check_data(data)
    out.mkdir(parents=True, exist_ok=True)
    data = _data_of(recipe, data)
    builtin = f"no data given: {recipe.builtin}" if data is None and recipe.builtin else None
    if builtin is not None:
        announce(builtin)

    request = Request(scale, out, data, announce, encoder, vectors, languages, jobs, minutes)
    power = None if recipe.power is None else dict(recipe.power(request))
    stem = file_stem(name)
    started = time.perf_counter()
    result = recipe(request)
    seconds = time.perf_counter() - started
    if scale == "toy":
        result = replace(result, holds=None)
    if builtin is not None:
        result = replace(result, notes=(*result.notes, builtin))

    earlier = finished(out, name)
    if earlier is not None and earlier["scale"] == "toy":
        earlier = None  # no evidence

    first = leads(earlier, {"scale": scale, "size": result.size})
    files = tuple(out / f"{stem}{suffix}" for suffix in (".csv", ".svg", ".json"))
    done = Reproduced(name, scale, recipe.claim, result, seconds, files, encoder, first)
    values = _values(recipe, request, done, power, inputs)
    if scale != "toy":
        values = with_history(earlier, values)
    if first or scale != "toy":
        _write(done, values, out)

    return done


def _write(done: Reproduced, values: Mapping[str, Any], out: Path) -> None:
    """Write the JSON of a row, and the table and drawing of the run if it decides the row."""
    with replace_files(out) as folder:
        table, figure, claim = (folder / file.name for file in done.files)
        if done.leads:
            rows = done.result.rows
            columns = list(dict.fromkeys(column for row in rows for column in row))
            write_csv(table, columns, rows)
            draw(done.result.panels, figure)
        claim.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _values(
    recipe: Recipe,
    request: Request,
    done: Reproduced,
    power: Mapping[str, Any] | None,
    inputs: Mapping[str, str | None],
) -> dict[str, Any]:
    """Return the JSON of one run."""
    result = done.result
    words = {"data": "DATA", "encoder": "ENCODER", "vectors": "VECTORS"}
    words["languages"] = request.languages or ""
    options = [f" --{flag} {word}" for flag, word in words.items() if inputs[flag] is not None]
    read = {
        option: Path(value).name
        for option, value in (("encoder", request.encoder), ("vectors", request.vectors))
        if value is not None
    }

    return {
        "recipe": recipe.name,
        "scale": request.scale,
        "kind": recipe.kind(request.scale, request.encoder),
        "size": result.size,
        **({"missing": result.missing} if result.missing else {}),
        "paper_size": recipe.paper_size,
        "paper_says": recipe.claim,
        "quoted": recipe.notes_under("Quote"),
        "we_got": result.got,
        "holds": result.holds,
        "criterion": None if result.criterion is None else asdict(result.criterion),
        "power": power,
        "notes": list(result.notes),
        "seconds": round(done.seconds, 1),
        "data": None if request.data is None else Path(request.data).name or request.data,
        "command": f"wellposed reproduce {recipe.name} --scale {request.scale}{''.join(options)}",
        **read,
        "made_with": _made_with(),
        "protocol": recipe.protocol(request.scale),
        "judge": recipe.judge(),
    }
