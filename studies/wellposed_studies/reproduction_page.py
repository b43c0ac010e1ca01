"""Page of all finished artefacts: claims, results and how sure they are; no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wellposed_studies.evidence import SEEN, VERDICTS, short_size, size_words, steps_words
from wellposed_studies.recipe import RECIPES, SCALES, Recipe, Scale, recipe_names
from wellposed_studies.rows import (
    Group,
    counted,
    finished,
    is_stale,
    judged_earlier,
    kind_of,
    row_groups,
    row_words,
    runs_of,
    verdict_of,
)
from wellposed_studies.run_history import disagreement
from wellposed_studies.run_order import not_compared, run_name

_STALE = "made before 0.4, or a number of its measurement has changed; run it again"
_GUIDE = """Written by `wellposed reproduce all --scale mini` from the JSON files of artefacts, not by hand. There
are two kinds of row. Mathematics is a theorem, a figure of random weights, a count, or an experiment
at the paper's own size: it is confirmed or contradicted. A row that is trained below the paper's size
says what is seen, not seen, or none of the printed size, at the size that its first line names. It
contradicts nothing. The paper's size is beside it; what is in brackets is not printed there.

A verdict names its test, its seeds and its uncertainty. Each trained model must beat a constant
predictor by three standard errors, and must have levelled off on held-out data, stopped as the
paper's did, or passed its test's threshold. A model that overfits has read too little and is not
level. Its training loss also rises if its blocks return their inputs (in results made after 0.4).
Tests check that the same recipes stay undecided for untrained models, constant answers, shuffled
labels, blocks that return their inputs and models without blocks. A table of made-up worlds checks
that each test answers differently if the effect is absent, as printed, reversed, or 2.5 times as
large.

Every run that was ever committed is listed, one that was continued as it ended. The largest
decides, and a smaller one never replaces it. Runs are ordered by what they read, then by steps,
width and depth, and by scale where their sizes have no order. Sizes of runs before 0.5 are
reconstructed: from the configurations that their commit plans, and for the first runs of Zhang's
tables, frontier/characters and qr, in part by inference from today's. If decided runs disagree, the
row is undecided. Two artefacts of the same runs are one row. A row is stale if it has no digest
(before 0.4, or restored), or a number of its measurement has changed since. A verdict by rules that
have changed since counts as undecided until it is run again. Undecided rows say what would decide
them. The notes of a withdrawn verdict begin with the withdrawal. Minutes are those of the last call
(until 0.3: of all calls). The call that runs a shared training counts its minutes. DATA in a
command is the path named under data."""
OWN_HEADING = "Our own claims"


def reproduction_page(folder: Path) -> str:
    """Return the Markdown page of the finished artefacts in ``folder``; toy runs are left out."""
    all_found = {name: finished(folder, name) for name in recipe_names()}
    artefacts = [values for values in all_found.values() if values and values["scale"] != "toy"]
    missing = all_found.keys() - {values["recipe"] for values in artefacts}
    stale = sum(map(is_stale, artefacts))
    papers, ours = row_groups(artefacts)
    lines = [
        f"# Reproduction\n\n**{counted_papers(folder)}**{f'; {stale} stale' if stale else ''}."
    ]
    lines.append(f"\n**{counted_own(folder)}**: [their own part](#our-own-claims).")
    if missing:
        lines.append(f"\nNot run: {', '.join(name for name in all_found if name in missing)}.")

    lines += ['\n<div class="artefacts" markdown>', _overview(papers)]
    lines += [_folded("How to read this page", _GUIDE), *_sections(papers), "\n</div>"]
    lines += [f"\n# {OWN_HEADING}\n", "Questions of this project, which no paper claims."]
    lines += ['\n<div class="artefacts" markdown>', _overview(ours), *_sections(ours)]
    return "\n".join([*lines, "\n</div>\n"])


def counted_papers(folder: Path) -> str:
    """Return the number of rows of the papers in a folder, by verdict; README has the same words."""
    return counted(_groups(folder)[0], "tables, figures and theorems of the papers")


def counted_own(folder: Path) -> str:
    """Return the number of rows of our own claims in a folder, by verdict."""
    return counted(_groups(folder)[1], "claims of our own")


def _groups(folder: Path) -> tuple[list[Group], list[Group]]:
    rows = [finished(folder, name) for name in recipe_names()]
    return row_groups([values for values in rows if values and values["scale"] != "toy"])


def _overview(groups: Sequence[Group]) -> str:
    """Return a table with one line for each row, linked to its artefacts."""
    lines = ["\n| artefact | what | scale | seeds | verdict |", "|---|---|---|---|---|"]
    for group in groups:
        names = ", ".join(f"[{values['recipe']}](#{_anchor(values)})" for values in group)
        first = group[0]
        what = _cell(RECIPES.get(first["recipe"]).summary)
        verdicts = "; ".join(dict.fromkeys(map(_verdict, group)))
        cells = (names, what, first["scale"], _seeds(first), verdicts)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _anchor(values: Mapping[str, Any]) -> str:
    """Return the anchor of a heading, as made by GitHub and Python-Markdown."""
    return re.sub(r"[^\w\- ]", "", _title(values).lower()).replace(" ", "-")


def _title(values: Mapping[str, Any]) -> str:
    return f"{values['recipe']} ({values['scale']})"


def _verdict(values: Mapping[str, Any]) -> str:
    running = f", running: {values['missing']} missing" if values.get("missing") else ""
    return row_words(values) + running + is_stale(values) * ", stale"


def _seeds(values: Mapping[str, Any]) -> object:
    return (values["criterion"] or {}).get("seeds") or "none drawn"


def _sections(groups: Sequence[Group]) -> list[str]:
    return [_section(values, group) for group in groups for values in group]


def _section(values: Mapping[str, Any], group: Group) -> str:
    criterion = values["criterion"] or {"test": "none", "uncertainty": "none"}
    power = values.get("power")  # None if nothing is trained
    limits = power and {"could be seen": power["words"], "levelled off": power["levelled_off"]}
    recipe = RECIPES.get(values["recipe"])
    undecided = verdict_of(values) is None and values["criterion"]
    others = [other["recipe"] for other in group if other is not values]
    rows = {
        **_size_rows(values, recipe),
        "paper": values["paper_says"],
        **({"quoted": "; ".join(quotes)} if (quotes := recipe.notes_under("Quote")) else {}),
        "ours": values["we_got"],
        "verdict": row_words(values),
        **_reservations(values),
        **({"one row with": ", ".join(others)} if others else {}),
        **({"stale": _STALE} if is_stale(values) else {}),
        "test": criterion["test"],
        "seeds": _seeds(values),
        "uncertainty": criterion["uncertainty"],
        "runs": "; ".join(_run_words(values)),
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


def _size_rows(values: Mapping[str, Any], recipe: Recipe) -> dict[str, str]:
    """Return our size and the paper's, for a training below it; nothing for mathematics."""
    if kind_of(values) == "mathematics":
        return {}
    paper = {} if recipe.is_ours else {"paper's size": size_words(recipe.paper_size)}
    return {"size": size_words(values.get("size")), **paper}


def _reservations(values: Mapping[str, Any]) -> dict[str, str]:
    """Return why the verdict of the largest run is not that of the row."""
    words = SEEN if kind_of(values) == "trained" else VERDICTS
    reasons = {}
    different = disagreement(runs_of(values))
    if different:
        runs = ", ".join(f"{run} {words[holds]}" for run, holds in different)
        reasons["runs disagree"] = f"{runs}; so the row is undecided"

    unordered = not_compared(values.get("size"), runs_of(values))
    if unordered and kind_of(values) == "trained":
        reasons["sizes of runs"] = f"no order but that of scale and time: {', '.join(unordered)}"
    if values["holds"] is not None and judged_earlier(values):
        was = words[values["holds"]]
        reasons["judged earlier"] = f"{was} by rules that have changed since; run it again"

    return reasons


def _run_words(values: Mapping[str, Any]) -> list[str]:
    """Return every run in words: scale, commit of its program, its size and its verdict then."""
    words = SEEN if RECIPES.get(values["recipe"]).kind("mini") == "trained" else VERDICTS
    return [
        f"{run_name(run)}{_size_of_run(run)}: {words[run['verdict']]}" for run in runs_of(values)
    ]


def _size_of_run(run: Mapping[str, Any]) -> str:
    size = run.get("size")
    return f" ({short_size(size)}, {steps_words(size)})" if size else ""


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
