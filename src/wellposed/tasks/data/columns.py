"""Which columns of a table hold the label and the text; a text may be several columns, joined or a
pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from wellposed.errors import ConfigError, DataError, listed, nearest_names

LABEL_NAMES = (
    "label",
    "labels",
    "target",
    "class",
    "sentiment",
    "category",
    "class index",
    "topic",
)
# The first of these that a header holds whole is the text.
TEXT_NAMES = (
    ("text",),
    ("sentence",),
    ("source",),
    ("review",),
    ("title", "description"),
    ("title", "content"),
    ("question_title", "question_content", "best_answer"),
    ("content",),
    ("document",),
)
AUTO = "auto"


@dataclass(frozen=True)
class TableOptions:
    """How a table is read."""

    label_column: str = AUTO
    text_column: str = AUTO
    header: Literal["auto", "yes", "no"] = "auto"
    quoting: Literal["auto", "csv", "none"] = "auto"
    pairs: bool = False
    """Whether two text columns are the two texts of a pair; they are joined by a space where
    not."""


@dataclass(frozen=True)
class Columns:
    """Where the label and the parts of the text stand, and a sentence for the description."""

    label: int
    text: tuple[int, ...]
    is_header: bool
    described: str


def paired(parts: Sequence[str], options: TableOptions) -> tuple[str, str] | None:
    """Return the two texts of a row that is a pair; None where a row holds one text."""
    return (parts[0], parts[1]) if options.pairs and len(parts) == 2 else None


def join_text(parts: Sequence[str]) -> str:
    """Join the parts of a text that are not blank by one space; a single part stays as it is.

    >>> join_text(["Oil rises", " ", "Prices rose."]), join_text([" as it is "])
    ('Oil rises Prices rose.', ' as it is ')
    """
    return parts[0] if len(parts) == 1 else " ".join(part for part in parts if part.strip())


def find_columns(where: str, first: Sequence[str], options: TableOptions, *, join: bool) -> Columns:
    """Return the columns of a table from its first row, or raise naming what is wrong with them.

    ``join`` says whether the text of a table without a header is every column after the label, not
    the last one alone.
    """
    if len(first) < 2:
        raise DataError(
            f"{where}: one column, expected a label and a text; is the delimiter of the file its"
            " ending's?"
        )
    wanted = {"label": options.label_column, "text": options.text_column}
    numbers = {role: _numbers(role, column) for role, column in wanted.items()}
    by_name = {role: column for role, column in wanted.items() if numbers[role] is None}
    given = [column for column in by_name.values() if column != AUTO]
    if given and options.header == "no":
        raise ConfigError(
            f"columns {', '.join(given)} are names, and header is 'no'; give numbers from 0"
        )
    found = {role: _named(first, role, column) for role, column in by_name.items()}
    complete = bool(by_name) and None not in found.values()
    is_header = options.header == "yes" or (options.header == "auto" and (bool(given) or complete))
    if is_header:
        missing = {role: by_name[role] for role, places in found.items() if places is None}
        if missing:
            raise _no_column(where, first, missing)
        label = (found.get("label") or numbers["label"] or (0,))[0]
        text = found.get("text") or numbers["text"] or ()
    else:
        label = (numbers["label"] or (0,))[0]
        after = tuple(range(label + 1, len(first)))
        text = numbers["text"] or (after if join and after else (len(first) - 1,))
    _refuse_positions(where, label, text, len(first))
    return Columns(label, text, is_header, _describe(first, label, text, is_header, options))


def find_keys(
    where: str, names: Sequence[str], options: TableOptions
) -> tuple[str, tuple[str, ...]]:
    """Return the key of the label and the keys of the text of a row with named values."""
    label = _named(names, "label", options.label_column)
    text = _named(names, "text", options.text_column)
    if label is None or text is None:
        missing = {"label": options.label_column} if label is None else {}
        raise _no_column(
            where, names, missing | ({"text": options.text_column} if text is None else {})
        )
    return names[label[0]], tuple(names[place] for place in text)


def describe_names(names: Sequence[str], options: TableOptions) -> str:
    """Return quoted names, and what becomes of several."""
    return " + ".join(map(repr, names)) + _what_becomes(names, options)


def _what_becomes(columns: Sequence[Any], options: TableOptions) -> str:
    if len(columns) < 2:
        return ""
    return " as a pair" if options.pairs and len(columns) == 2 else " joined by a space"


def _describe(
    first: Sequence[str], label: int, text: Sequence[int], is_header: bool, options: TableOptions
) -> str:
    unread = [place for place in range(len(first)) if place != label and place not in text]
    if is_header:
        described = (
            f"header, label {first[label]!r}, text"
            f" {describe_names([first[place] for place in text], options)}"
        )
        return described + (
            f"; not read: {', '.join(repr(first[place]) for place in unread)}" if unread else ""
        )
    places = (
        ("columns " if len(text) > 1 else "column ")
        + ", ".join(map(str, text))
        + _what_becomes(text, options)
    )
    described = f"no header, label in column {label}, text in {places}"
    return described + (f"; not read: column {', '.join(map(str, unread))}" if unread else "")


def _numbers(role: str, column: str) -> tuple[int, ...] | None:
    """Return the positions that ``column`` gives as numbers; several, between commas, for the text
    alone."""
    parts = [part.strip() for part in column.split(",")] if role == "text" else [column]
    return (
        tuple(map(int, parts)) if all(part.isascii() and part.isdigit() for part in parts) else None
    )


def _named(header: Sequence[str], role: str, column: str) -> tuple[int, ...] | None:
    """Return the positions of named columns; ``auto`` takes the first known names, in any case."""
    if column != AUTO:
        names = (
            [column]
            if column in header or role == "label"
            else [part.strip() for part in column.split(",")]
        )
        return (
            tuple(list(header).index(name) for name in names)
            if all(name in header for name in names)
            else None
        )
    folded = [name.strip().lower() for name in header]
    known = [(name,) for name in LABEL_NAMES] if role == "label" else TEXT_NAMES
    chosen = next((names for names in known if all(name in folded for name in names)), None)
    return None if chosen is None else tuple(folded.index(name) for name in chosen)


def _refuse_positions(where: str, label: int, text: Sequence[int], count: int) -> None:
    problems = [
        f"{where}: {role}_column = {place}, expected a number below {count}, the number of columns"
        for role, places in (("label", [label]), ("text", text))
        for place in places
        if place >= count
    ]
    if label in text:
        problems.append(f"{where}: label and text are both column {label}")
    if problems:
        raise DataError("the columns cannot be used:\n" + listed(problems))


def _no_column(where: str, header: Sequence[str], missing: dict[str, str]) -> DataError:
    problems = []
    for role, column in missing.items():
        known = " or ".join(LABEL_NAMES if role == "label" else map(" + ".join, TEXT_NAMES))
        absent = [part for part in map(str.strip, column.split(",")) if part not in header]
        near = "; ".join(
            f"{part!r} (nearest: {', '.join(nearest_names(part, header))})" for part in absent
        )
        wanted = f"named {known}" if column == AUTO else near
        problems.append(f"{where}: no {role} column {wanted}; give {role}_column=NAME")
    return DataError(f"the header {list(header)} lacks a column:\n" + listed(problems))
