"""Folders of ``wellposed reproduce``: what was claimed, what was found, tables and drawings."""

from __future__ import annotations

import base64
import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellposed.errors import DataError
from wellposed.finite_json import from_json
from wellposed.regular_file import read_bytes
from wellposed.report._html_table import Column, Table, slug

VERDICTS = {True: "holds", False: "does not hold", None: "cannot be said at this scale"}
_NEEDED = ("recipe", "paper_says", "we_got", "holds")


@dataclass(frozen=True)
class Artefact:
    """One reproduced table or figure."""

    title: str
    facts: Mapping[str, str]
    remarks: Sequence[str]
    tables: Sequence[Table]
    drawings: Sequence[tuple[str, str]]
    """What each shows, and the SVG as an address; as an image it can neither run nor fetch
    anything."""


def find_artefacts(paths: Sequence[Path]) -> list[Artefact]:
    """Return what was reproduced in ``paths`` or the folders right below them.

    Raises:
        DataError: a table or text of theirs cannot be read.
    """
    folders: dict[Path, Path] = {}
    for path in map(Path, paths):
        if path.is_dir():
            for folder in (path, *_folders_in(path)):
                if not (folder / "config.toml").exists() and not (folder / "result.json").exists():
                    folders.setdefault(folder.resolve(), folder)
    return [found for folder in folders.values() for found in _in_folder(folder)]


def _folders_in(path: Path) -> list[Path]:
    """Return the folders right below ``path``, without those that a command is still writing."""
    return sorted(
        child for child in path.iterdir() if child.is_dir() and not child.name.startswith(".")
    )


def overview(artefacts: Sequence[Artefact]) -> Table | None:
    """Return one row for each of several claims."""
    claims = [artefact for artefact in artefacts if "verdict" in artefact.facts]
    rows = [{"name": each.title, **each.facts} for each in claims]
    shown = [Column(name, name, "text") for name in ("verdict", "scale", "seeds")]
    hidden = [
        Column(name, name, "hidden")
        for name in ("test", "uncertainty", "paper says", "we got", "command")
    ]
    columns = [Column("name", "table or figure", "text"), *shown, *hidden]
    return (
        Table("claims", "What the papers say and what we got", columns, rows)
        if len(claims) > 1
        else None
    )


def _in_folder(folder: Path) -> Iterator[Artefact]:
    try:
        for file in sorted(folder.glob("*.json")):
            values = _claim(file)
            if values is not None:
                yield _reproduction(file, values)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"{folder}: a table, text or drawing cannot be read ({error}); make it again"
        ) from error


def _claim(file: Path) -> dict[str, Any] | None:
    try:
        values = from_json(read_bytes(file))
    except ValueError:
        return None
    return values if isinstance(values, dict) and all(name in values for name in _NEEDED) else None


def _reproduction(file: Path, values: dict[str, Any]) -> Artefact:
    criterion = values.get("criterion")
    test = criterion if isinstance(criterion, dict) else {}
    verdict = VERDICTS[values["holds"] if values["holds"] in (True, False) else None]
    facts = {
        "paper says": values["paper_says"], "we got": values["we_got"], "verdict": verdict,
        "test": test.get("test"), "seeds": test.get("seeds"), "uncertainty": test.get("uncertainty"),
        "scale": values.get("scale"), "time, s": values.get("seconds"), "data": values.get("data"),
        "command": values.get("command"),
    }  # fmt: skip
    notes = values.get("notes")
    return Artefact(
        str(values["recipe"]),
        {name: str(value) for name, value in facts.items() if value is not None},
        [str(note) for note in notes] if isinstance(notes, list) else [],
        [_table(path) for path in [file.with_suffix(".csv")] if path.is_file()],
        [
            _drawing(path, str(values["recipe"]))
            for path in [file.with_suffix(".svg")]
            if path.is_file()
        ],
    )


def _table(file: Path) -> Table:
    with file.open(newline="", encoding="utf-8") as lines:
        heading, *rows = [row for row in csv.reader(lines) if row] or [[]]
    if len(set(heading)) < len(heading) or any(len(row) != len(heading) for row in rows):
        raise csv.Error(f"{file.name}: expected different headings, and as many cells in every row")
    numeric = [
        all(_number(row[k]) is not None for row in rows if row[k]) for k in range(len(heading))
    ]
    cells = [
        {
            name: _number(text) if number else text
            for name, number, text in zip(heading, numeric, row, strict=True)
        }
        for row in rows
    ]
    columns = [
        Column(name, name.replace("_", " "), "number" if number else "text")
        for name, number in zip(heading, numeric, strict=True)
    ]
    return Table(slug(file.stem), f"{file.name}, {len(rows):,} rows", columns, cells)


def _number(text: str) -> float | int | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def _drawing(file: Path, what: str) -> tuple[str, str]:
    return what, f"data:image/svg+xml;base64,{base64.b64encode(file.read_bytes()).decode()}"
