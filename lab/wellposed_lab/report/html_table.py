"""Tables of a page: cells, sort keys, and the table as CSV inside the page."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from wellposed.measurement import csv_text
from wellposed.text_table import MISSING, format_number


@dataclass(frozen=True)
class Cell:
    """A value with a text or style other than its column's."""

    value: Any
    text: str
    style: str = ""


@dataclass(frozen=True)
class Column:
    """One column: its name in the CSV, its heading, and the format of its values."""

    name: str
    heading: str
    kind: Literal["text", "wrap", "number", "count", "hidden"] = "number"
    digits: int = 4


class ShownCell(NamedTuple):
    """Cell for the template: text, CSS classes, and the number to sort by if there is one."""

    text: str
    style: str
    sort: str


@dataclass(frozen=True)
class Table:
    """Rows by column name; the first column is the row's heading. Values are raw: the CSV has all digits."""

    name: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    data: CsvLink | None = None
    """A CSV with more columns, used in place of the table's own."""

    @property
    def headings(self) -> list[Column]:
        """The columns that the page shows."""
        return [column for column in self.columns if column.kind != "hidden"]

    @property
    def body(self) -> list[list[ShownCell]]:
        """The rows that the page shows."""
        return [[_shown(row.get(c.name), c) for c in self.headings] for row in self.rows]

    @property
    def csv(self) -> CsvLink:
        """The whole table as CSV."""
        if self.data is not None:
            return self.data
        plain = lambda value: value.value if isinstance(value, Cell) else value  # noqa: E731
        rows = [{name: plain(value) for name, value in row.items()} for row in self.rows]
        return csv_link(self.name, [column.name for column in self.columns], rows)


class CsvLink(NamedTuple):
    """A file inside the page."""

    file: str
    address: str


def csv_link(name: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> CsvLink:
    """Return a CSV file as the address of a link; no cell of it is a formula."""
    content = base64.b64encode(csv_text(columns, rows).encode()).decode()
    return CsvLink(f"{slug(name)}.csv", f"data:text/csv;charset=utf-8;base64,{content}")


def slug(name: str) -> str:
    """Return ``name`` as part of a file name.

    >>> slug("1 Char LM: <b>")
    '1-char-lm-b'
    """
    return re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-")[:60]


def _shown(value: Any, column: Column) -> ShownCell:
    cell = value if isinstance(value, Cell) else Cell(value, _text(value, column))
    number = isinstance(cell.value, (int, float)) and not isinstance(cell.value, bool)
    kinds = {"text": "text", "wrap": "text wrap"}
    style = f"{kinds.get(column.kind, '')} {cell.style}".strip()
    return ShownCell(cell.text, style, repr(cell.value) if number else "")


def _text(value: Any, column: Column) -> str:
    if column.kind == "count" and isinstance(value, (int, float)):
        return f"{value:,.0f}"
    return format_number(value, column.digits) or MISSING
