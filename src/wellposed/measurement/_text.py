"""Tables for a terminal: rich where it is installed, plain aligned text otherwise."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

MISSING = "-"


def format_number(value: Any, digits: int = 4) -> str:
    """Return ``value`` with ``digits`` significant digits; ``-`` for ``None``.

    >>> [format_number(value) for value in (0.123456, 3, None, float("inf"), 12345.678, 1.2e-7)]
    ['0.1235', '3', '-', 'inf', '1.235e+04', '1.2e-07']
    """
    if value is None:
        return MISSING
    if isinstance(value, float):
        return f"{value:.{digits}g}" if math.isfinite(value) else str(value)
    return str(value)


def text_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return a table as text without colour; the first ``left`` columns are aligned left, the others right.

    >>> print(plain_table("norms", ["role", "sigma"], [["query", "1.02"]]))
    norms
    role   sigma
    -----  -----
    query   1.02
    """
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return plain_table(title, columns, rows, left=left)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="left" if index < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    out = io.StringIO()
    width = 4 * len(columns) + sum(map(max, _widths(columns, rows)))
    Console(file=out, width=width, color_system=None, force_terminal=False, legacy_windows=False).print(table)
    return "\n".join([title, *(line.rstrip() for line in out.getvalue().splitlines())])


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return the same table from spaces and dashes alone."""
    widths = [max(lengths) for lengths in _widths(columns, rows)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return "\n".join([title, line(columns), "  ".join("-" * w for w in widths), *map(line, rows)])


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[list[int]]:
    return [[len(str(cell)) for cell in column] for column in zip(columns, *rows, strict=True)]
