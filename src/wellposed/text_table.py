"""Tables for a terminal: columns padded with spaces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

MISSING = "-"


def format_number(value: Any, digits: int = 4) -> str:
    """Return ``value`` with ``digits`` significant digits; ``-`` for ``None``."""
    if value is None:
        return MISSING
    if isinstance(value, float):
        return f"{value:.{digits}g}" if math.isfinite(value) else str(value)
    return str(value)


def printable(text: str, keep: str = "") -> str:
    """Return ``text`` with the characters escaped that could control a terminal."""
    are_plain = (character.isprintable() or character in keep for character in text)
    return "".join(c if plain else repr(c)[1:-1] for c, plain in zip(text, are_plain, strict=True))


def text_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1
) -> str:
    """Return a titled table; the first ``left`` columns are aligned left, the others right.

    >>> print(text_table("norms", ["role", "sigma"], [["query", "1.02"]]))
    norms
    role   sigma
    -----  -----
    query   1.02
    """
    dashes = ["-" * width for width in _widths([columns, *rows])]
    return f"{title}\n{aligned([columns, dashes, *rows], 'l' * left + 'r')}"


def aligned(lines: Sequence[Sequence[str]], alignment: str = "lr") -> str:
    """Return lines of cells as text; ``alignment`` has l or r per column, the last repeated."""
    widths = _widths(lines)
    sides = [str.ljust if side == "l" else str.rjust for side in alignment]
    sides += sides[-1:] * (len(widths) - len(sides))
    padded = [
        [pad(cell, width) for cell, width, pad in zip(line, widths, sides, strict=False)]
        for line in lines
    ]
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def _widths(lines: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*lines, strict=True)]
