"""Page of all finished artefacts: claims, results and how sure they are; no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from wellposed.finite_json import from_json
from wellposed.options import misfits
from wellposed_studies.recipe import (
    RECIPES,
    SCALES,
    VERDICTS,
    Recipe,
    Scale,
    recipe_names,
)
from wellposed_studies.reproduce import file_stem

_ENTRIES: dict[str, Any] = {"seconds": float, "notes": list}
_ENTRIES |= dict.fromkeys(("recipe", "scale", "paper_says", "we_got", "command"), str)
_ENTRIES |= {"criterion": dict | None, "data": str | None}
_ENTRIES["holds"] = bool | Literal["smaller"] | None
_STALE = "made before 0.4, or a number of its recipe or of the rules has changed; run it again"
_GUIDE = """Written by `wellposed reproduce all --scale mini` from the JSON files of artefacts, not by hand. A
verdict names its test, its seeds and its uncertainty. For a verdict about trained models each must
beat a constant predictor by three standard errors, and must have levelled off, stopped as the
paper's did, or passed its test's threshold. In results made after 0.4, its training loss also rises
if its blocks return their inputs. Tests check that the same recipes stay undecided for untrained
models, constant answers, shuffled labels, blocks that return their inputs and models without
blocks. The verdict "none of that size" means that the smallest gain in print would have been seen.
A row is stale if it was made before 0.4, or a number of its recipe has changed since. Undecided
rows say what would decide them. The notes of a withdrawn verdict begin with the withdrawal. Minutes
are those of the last call (until 0.3: of all calls). The call that runs a shared training counts
its minutes. DATA in a command is the path named under data."""


def finished(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the JSON of a finished recipe; None if there is none or its format is old."""
    path = folder / f"{file_stem(name)}.json"
    if not path.is_file():
        return None
    try:
        values = from_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    complete = isinstance(values, dict) and _ENTRIES.keys() <= values.keys()
    if not complete or [*misfits({name: values[name] for name in _ENTRIES}, _ENTRIES)]:
        return None
    criterion = values["criterion"]
    tested = criterion is None or {"test", "seeds", "uncertainty"} <= set(criterion)
    return values if tested else None


def reproduction_page(folder: Path) -> str:
    """Return the Markdown page of the finished artefacts in ``folder``; toy runs are left out."""
    all_found = {name: finished(folder, name) for name in recipe_names()}
    artefacts = [values for values in all_found.values() if values and values["scale"] != "toy"]
    missing = all_found.keys() - {values["recipe"] for values in artefacts}
    stale = sum(map(is_stale, artefacts))
    counts = ", ".join(
        f"{sum(values['holds'] == holds for values in artefacts)} {verdict}"
        for holds, verdict in VERDICTS.items()
    )
    ran = f"{len(artefacts)} of {len(all_found)} tables, figures and claims"
    lines = [f"# Reproduction\n\n**{counts}**{f'; {stale} stale' if stale else ''}: {ran}."]
    if missing:
        lines.append(f"\nNot run: {', '.join(name for name in all_found if name in missing)}.")
    lines += ['\n<div class="artefacts" markdown>', _overview(artefacts)]
    lines += [_folded("How to read this page", _GUIDE), *map(_section, artefacts), "\n</div>\n"]
    return "\n".join(lines)


def _overview(artefacts: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with one linked line for each artefact."""
    lines = ["\n| artefact | what | scale | seeds | verdict |", "|---|---|---|---|---|"]
    for values in artefacts:
        # Anchor of a heading, as made by GitHub and Python-Markdown.
        anchor = re.sub(r"[^\w\- ]", "", _title(values).lower()).replace(" ", "-")
        name = values["recipe"]
        what = _cell(RECIPES.get(values["recipe"]).summary)
        cells = (f"[{name}](#{anchor})", what, values["scale"], _seeds(values), _verdict(values))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def is_stale(values: Mapping[str, Any]) -> bool:
    """Return whether the numbers of the recipe have changed, or it was made before 0.4."""
    return values.get("protocol") != RECIPES.get(values["recipe"]).protocol(values["scale"])


def _title(values: Mapping[str, Any]) -> str:
    return f"{values['recipe']} ({values['scale']})"


def _verdict(values: Mapping[str, Any]) -> str:
    return VERDICTS[values["holds"]] + is_stale(values) * ", stale"


def _seeds(values: Mapping[str, Any]) -> object:
    return (values["criterion"] or {}).get("seeds") or "none drawn"


def _section(values: Mapping[str, Any]) -> str:
    criterion = values["criterion"] or {"test": "none", "uncertainty": "none"}
    power = values.get("power")  # None if nothing is trained
    limits = power and {"could be seen": power["words"], "levelled off": power["levelled_off"]}
    recipe = RECIPES.get(values["recipe"])
    undecided = values["holds"] is None and values["criterion"]
    rows = {
        "paper": values["paper_says"],
        **({"quoted": "; ".join(quotes)} if (quotes := recipe.told("Quote")) else {}),
        "ours": values["we_got"],
        "verdict": VERDICTS[values["holds"]],
        **({"stale": _STALE} if is_stale(values) else {}),
        "test": criterion["test"],
        "seeds": _seeds(values),
        "uncertainty": criterion["uncertainty"],
        **({"to decide": _needs(recipe, values["scale"])} if undecided else {}),
        **(limits or {}),
        "minutes": f"{values['seconds'] / 60:.1f}",
        "command": f"`{values['command']}`",
        "data": values["data"] or "none, or what ships with the package and Python",
        "notes": "; ".join(map(str, [*recipe.withdrawals, *values["notes"]])) or "none",
    }
    made = values.get("made_with")
    if made:  # None in older files
        source = f" at {str(made['source'])[:7]}" if made["source"] else ""
        versions = f"wellposed {made['wellposed']}{source}, torch {made['torch']}"
        rows["made"] = f"{made['date']}, {versions}, {made['machine']}"
    table = [f"| {name} | {_cell(value)} |" for name, value in rows.items()]
    title = _title(values)
    return _folded(f"{title}: {_verdict(values)}", f"## {title}\n", "| | |", "|---|---|", *table)


def _folded(summary: str, *lines: str) -> str:
    """Return lines below a summary that opens them; so does a link to a heading among them."""
    head = f"\n<details markdown>\n<summary>{summary}</summary>\n"
    return "\n".join([head, *lines, "\n</details>"])


def _needs(recipe: Recipe, scale: str) -> str:
    """Return the time and hardware that a larger run of a recipe needs."""
    machines: dict[Scale, str] = {"medium": "two CPU cores", "paper": "one large GPU"}
    times = [
        f"--scale {larger}: {recipe.time(larger)} on {machines[larger]}"
        for larger in SCALES[SCALES.index(scale) + 1 :]
        if larger in recipe.minutes
    ]
    beyond = f"{recipe.beyond or 'more than a day'} on one large GPU (docs/paper_scale.md)"
    return "; ".join(times) or f"the sizes of the paper: {beyond}"


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
