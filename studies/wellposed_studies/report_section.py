"""Report sections about folders of `wellposed reproduce`: claim, verdict, table, drawing."""

from __future__ import annotations

import base64
import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from wellposed.errors import DataError
from wellposed.finite_json import from_json
from wellposed.safe_read import read_bytes
from wellposed_lab.report.extra_sections import REPORT_SECTIONS, ExtraSection
from wellposed_lab.report.html_table import Column, Table, slug
from wellposed_studies.evidence import FIELDS, SEEN, VERDICTS, short_size, size_words

_NEEDED = ("recipe", "paper_says", "we_got", "holds")
_SVG = "data:image/svg+xml;base64,"


@REPORT_SECTIONS.register("reproductions")
def reproductions(folders: Sequence[Path]) -> list[ExtraSection]:
    """Return a section for each finished artefact, and an overview; `DataError` if unreadable."""
    sections = [section for folder in folders for section in _in_folder(folder)]
    if len(sections) < 2:
        return sections
    rows = [{"name": entry.title, **entry.facts} for entry in sections]
    visible = [Column(name, name, "text") for name in ("verdict", "scale", "seeds")]
    names = ("test", "uncertainty", "paper says", "we got", "command")
    hidden = [Column(name, name, "hidden") for name in names]
    columns = [Column("name", "table or figure", "text"), *visible, *hidden]
    title = "Claims of the papers and our results"
    return [ExtraSection(title, tables=[Table("claims", title, columns, rows)]), *sections]


def _in_folder(folder: Path) -> Iterator[ExtraSection]:
    try:
        for file in sorted(folder.glob("*.json")):
            try:
                values = from_json(read_bytes(file))
            except ValueError:
                continue
            if isinstance(values, dict) and all(name in values for name in _NEEDED):
                yield _reproduction(file, values)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"{folder}: a table, text or drawing cannot be read ({error}); make it again"
        ) from error


def _reproduction(file: Path, values: dict[str, Any]) -> ExtraSection:
    criterion = values.get("criterion")
    test = criterion if isinstance(criterion, dict) else {}
    sizes = {name: _size(values.get(name)) for name in ("size", "paper_size")}
    facts = {
        "verdict": _verdict(values, sizes["size"]),
        **{name.replace("_", " "): size_words(size) for name, size in sizes.items() if size},
        "paper says": values["paper_says"], "we got": values["we_got"],
        **{name: test.get(name) for name in ("test", "seeds", "uncertainty")},
        "scale": values.get("scale"), "time, s": values.get("seconds"), "data": values.get("data"),
        "command": values.get("command"),
    }  # fmt: skip
    notes = values.get("notes")
    title = str(values["recipe"])
    drawing = file.with_suffix(".svg")
    drawn = base64.b64encode(drawing.read_bytes()).decode() if drawing.is_file() else ""
    table = file.with_suffix(".csv")

    return ExtraSection(
        title,
        {name: str(value) for name, value in facts.items() if value is not None},
        [str(note) for note in notes] if isinstance(notes, list) else [],
        [(title, _SVG + drawn)] if drawn else [],
        [_table(table)] if table.is_file() else [],
    )


def _size(size: Any) -> dict[str, Any] | None:
    return size if isinstance(size, dict) and set(FIELDS) <= set(size) else None


def _verdict(values: dict[str, Any], size: dict[str, Any] | None) -> str:
    if values.get("kind") != "trained":
        return VERDICTS.get(values["holds"], VERDICTS[None])
    return f"{SEEN.get(values['holds'], SEEN[None])} at {short_size(size)}"


def _table(file: Path) -> Table:
    with file.open(newline="", encoding="utf-8") as lines:
        heading, *rows = [row for row in csv.reader(lines) if row] or [[]]
    if len(set(heading)) < len(heading) or any(len(row) != len(heading) for row in rows):
        raise csv.Error(f"{file.name}: expected different headings, and as many cells in every row")
    columns = [Column(name, name.replace("_", " "), "text") for name in heading]
    cells = [dict(zip(heading, row, strict=True)) for row in rows]
    return Table(slug(file.stem), f"{file.name}, {len(rows):,} rows", columns, cells)
