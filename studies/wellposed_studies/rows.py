"""Rows of finished artefacts, read from their files: verdicts, and whether they are still dated; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from wellposed.finite_json import from_json
from wellposed.options import misfits
from wellposed_studies.evidence import SAME_RUNS, SEEN, VERDICTS, Kind, Verdict, verdict_words
from wellposed_studies.recipe import RECIPES
from wellposed_studies.run_history import disagreement, run_of

_ENTRIES: dict[str, Any] = {"seconds": float, "notes": list}
_ENTRIES |= dict.fromkeys(("recipe", "scale", "paper_says", "we_got", "command"), str)
_ENTRIES |= {"criterion": dict | None, "data": str | None}
_ENTRIES["holds"] = bool | Literal["smaller"] | None

Group: TypeAlias = Sequence[Mapping[str, Any]]
"""Rows of the artefacts that are made of the same runs."""


def file_stem(name: str) -> str:
    """Return the stem of the files of a recipe: ``kim2021-figure-2`` of ``kim2021/figure-2``."""
    return name.replace("/", "-")


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


def is_stale(values: Mapping[str, Any]) -> bool:
    """Return whether the numbers of its measurement have changed, or it was made before 0.4."""
    return values.get("protocol") != RECIPES.get(values["recipe"]).protocol(values["scale"])


def judged_earlier(values: Mapping[str, Any]) -> bool:
    """Return whether its verdict was found by other rules than those of today."""
    return values.get("judge") != RECIPES.get(values["recipe"]).judge()


def kind_of(values: Mapping[str, Any]) -> Kind:
    """Return the kind of evidence of a row."""
    return RECIPES.get(values["recipe"]).kind(values["scale"], values.get("encoder"))


def runs_of(values: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return every run of the artefact; the row's own if there is no list of them."""
    return values.get("runs") or [run_of(values)]


def verdict_of(values: Mapping[str, Any]) -> Verdict:
    """Return the verdict of a row: that of its largest run, by the rules of today.

    None if its runs disagree, or if it was judged by other rules.
    """
    undecided = disagreement(runs_of(values)) or judged_earlier(values)
    return None if undecided else values["holds"]


def row_words(values: Mapping[str, Any]) -> str:
    """Return the printed verdict of a row, with the size of a smaller training."""
    return verdict_words(kind_of(values), verdict_of(values), values.get("size"))


def row_groups(
    artefacts: Sequence[Mapping[str, Any]],
) -> tuple[list[Group], list[Group]]:
    """Return the rows of the papers, and of our own claims; artefacts of the same runs are one row."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for values in artefacts:
        name = values["recipe"]
        groups.setdefault(SAME_RUNS.get(name, name), []).append(values)
    papers: list[Group] = [group for name, group in groups.items() if not RECIPES.get(name).is_ours]
    ours: list[Group] = [group for name, group in groups.items() if RECIPES.get(name).is_ours]
    return papers, ours


def counted(groups: Sequence[Group], what: str) -> str:
    """Return the number of rows in words, by verdict: ``3 claims: 1 confirmed, 2 undecided``.

    A row of several artefacts has their common verdict, or is undecided.
    """
    tally: dict[str, int] = {}
    for group in groups:
        verdicts = {verdict_of(values) for values in group}
        holds = verdicts.pop() if len(verdicts) == 1 else None
        words = (SEEN if kind_of(group[0]) == "trained" else VERDICTS)[holds]
        tally[words] = tally.get(words, 0) + 1
    ordered = dict.fromkeys(words for holds in VERDICTS for words in (VERDICTS[holds], SEEN[holds]))
    counts = [f"{tally[words]} {words}" for words in ordered if words in tally]
    return f"{len(groups)} {what}: {', '.join(counts) or 'none run'}"
