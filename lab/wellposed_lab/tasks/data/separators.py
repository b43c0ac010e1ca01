"""The character that separates the fields of a csv: the one that cuts all lines alike."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Sequence

from wellposed.errors import DataError

SEPARATORS = ",\t;|"
PROBED_ROWS = 1000
_NAMES = {",": "a comma", "\t": "a tab", ";": "a semicolon", "|": "a bar"}


def find_separator(text: str, where: str) -> str:
    """Return the separator of a csv, among commas, tabs, semicolons and bars.

    It is the one that cuts the first 1,000 rows into the same number of fields, two or more. If
    several do, it is the one with a column of repeated values, as labels are, if the others have
    none. If none does, it is the first of them in the first line.

    Raises:
        DataError: several separators fit equally well.

    >>> find_separator("pos;good nice, a film\\nneg;bad, too long, a film\\n", "a.csv")
    ';'
    >>> find_separator("pos,good; nice\\nneg,bad; long\\npos,fine; short\\nneg,dull; slow\\n", "a.csv")
    ','
    """
    first = text.lstrip("\r\n").partition("\n")[0]
    present = [mark for mark in SEPARATORS if mark in first]
    tables = {mark: rows for mark in present if (rows := _even_rows(text, mark))}
    if len(tables) < 2:
        return next(iter(tables or present), ",")

    repeating = [mark for mark, rows in tables.items() if _repeats(rows)]
    if len(repeating) == 1:
        return repeating[0]

    rows = tables[next(iter(tables))]
    if len(rows) < 2:
        return next(iter(tables))  # one row shows nothing

    names = " or ".join(_NAMES[mark] for mark in tables)
    example = "; ".join(f"{mark!r}: {rows[0][0][:20]!r}, ..." for mark, rows in tables.items())
    raise DataError(
        f"{where}:1: the fields may be separated by {names} ({example}); put the fields with the"
        " other character in double quotes, or write the columns as .tsv"
    )


def _even_rows(text: str, mark: str) -> list[list[str]]:
    """Return the first rows if they have the same number of fields, two or more; else nothing."""
    limit = csv.field_size_limit(max(len(text), 1))
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=mark, strict=True)
    try:
        filled = (row for row in reader if any(cell.strip() for cell in row))
        rows = list(itertools.islice(filled, PROBED_ROWS))
    except csv.Error:
        return []
    finally:
        csv.field_size_limit(limit)
    lengths = {len(row) for row in rows}
    return rows if len(lengths) == 1 and min(lengths) > 1 else []


def _repeats(rows: Sequence[Sequence[str]]) -> bool:
    """Return whether some column has two rows or more for each of its values."""
    return any(2 * len(set(column)) <= len(rows) for column in zip(*rows, strict=True))
