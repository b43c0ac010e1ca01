"""Labelled texts: the columns of a table that have the label and the text.

A first line is a header if it has the requested names, or one of `LABEL_NAMES` and one of
`TEXT_NAMES` in any case; other likely headers are refused. Without one, the label is the first
column. The text is the last column of a tsv, and all others of a csv (joined by a space, as by
Zhang et al. 2015).
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from wellposed.errors import ConfigError, DataError, listed, nearest_names
from wellposed.options import CheckedOptions
from wellposed_lab.tasks.data import files, splits
from wellposed_lab.tasks.data.files import Table
from wellposed_lab.tasks.data.labels import clean_label, label_notes, label_problem, mixed_spellings
from wellposed_lab.tasks.data.splits import DataOptions, Described

Places: TypeAlias = tuple[int, ...]
_MORE = ("class index", "topic")
LABEL_NAMES = ("label", "labels", "target", "class", "sentiment", "category", *_MORE)
TEXT_NAMES = (
    ("text",),
    ("sentence",),
    ("source",),
    ("review",),
    ("title", "description"),
    ("title", "content"),
    ("title", "body"),
    ("question_title", "question_content", "best_answer"),
    ("content",),
    ("document",),
    ("headline",),
    ("body",),
)
"""The first of these that is entirely in a header is the text."""
AUTO = "auto"
SHOWN = 60
MAX_DIGITS = 4000
"""Python refuses whole numbers with more than about 4,300 digits; longer labels sort as texts."""
logger = logging.getLogger("wellposed_lab.tasks")


@dataclass(frozen=True)
class TableOptions(CheckedOptions):
    """Columns of a table of labels and texts."""

    label_column: str = AUTO
    """Name of the label column."""
    text_column: str = AUTO
    """Name of the text column; several, separated by commas, are joined by a space."""
    header: Literal["auto", "yes", "no"] = "auto"
    """Whether the first line names the columns; auto looks for usual names of a label and a text column."""


@dataclass(frozen=True)
class LabelledTexts:
    """Texts with their labels."""

    path: str
    texts: Sequence[str]
    labels: Sequence[str]
    places: Sequence[int] | Sequence[str]
    """The line of ``path`` at which each text starts, or its file."""
    columns: str
    """The columns of label and text, for the description."""
    trimmed: int = 0
    """Number of labels that had blanks around them."""

    def __len__(self) -> int:
        return len(self.texts)

    def where(self, index: int) -> str:
        return f"{self.path}:{self.places[index]}"

    def select(self, indices: Sequence[int]) -> LabelledTexts:
        texts, labels = ([column[i] for i in indices] for column in (self.texts, self.labels))
        places: Any = [self.places[i] for i in indices]
        return replace(self, texts=texts, labels=labels, places=places)


def load_labelled(
    options: DataOptions, table: TableOptions | None = None
) -> splits.Loaded[LabelledTexts]:
    """Read the labelled texts of all splits, cut missing splits from train, and describe the source."""
    columns = table or TableOptions()

    def read_file(path: Path) -> tuple[LabelledTexts, Described]:
        content, described = files.read_table(
            path, has_header=lambda first: is_header(first, columns)
        )
        texts = label_rows(content, columns, join=files.is_named(path, ".csv"))
        logger.info("%s: %s", path, texts.columns)
        return texts, described | {"columns": texts.columns}

    tables, described = splits.load_splits(
        options,
        suffixes=files.TABLE_SUFFIXES,
        read_file=read_file,
        read_hub=lambda rows, where: label_rows(files.hub_table(rows, where), columns),
    )
    for split, content in tables.items():
        if content.trimmed:
            described["files"][split]["label_blanks_removed"] = content.trimmed
    refuse_mixed(tables)
    loaded, described = splits.cut_missing(tables, tables["train"].path, described)
    labels = {split: content.labels for split, content in loaded.items()}
    return loaded, described | label_notes(labels)


def refuse_mixed(tables: Mapping[Any, LabelledTexts]) -> None:
    """Raise `DataError` if one class is spelled in two ways, in one split or in two."""
    labels = (
        (label, content.where(row))
        for content in tables.values()
        for row, label in enumerate(content.labels)
    )
    files.refuse(
        "labels that are one class in two spellings; write them alike", mixed_spellings(labels)
    )


def is_header(first: Sequence[str], options: TableOptions) -> bool:
    """Return whether the first row of a table names its columns."""
    asked = (options.label_column, options.text_column)
    names = [name for name in asked if name != AUTO]
    if names and options.header == "no":
        raise ConfigError(f"columns {', '.join(names)} without a header ('no'); add a first line")
    if options.header != "auto":
        return options.header == "yes"
    return bool(names) or None not in _named(first, options)


def label_rows(table: Table, options: TableOptions, *, join: bool = False) -> LabelledTexts:
    """Return the labelled texts of a table, or raise with every row that cannot be used. Without a
    header, ``join`` makes all columns after the label the text, not only the last."""
    if table.first and options.header == "auto":
        _refuse_header(table)
    label, text = _choose(table, options, join=join)
    labels, problems = table.texts(label, _as_label)
    problems += [
        f"{table.where}:{line}: {problem}"
        for line, value in zip(table.places, table.column(label), strict=True)
        if (problem := label_problem(value))
    ]
    parts = []
    for column in text:
        values, wrong = table.texts(column)
        parts.append(values)
        problems += wrong

    table.refuse(problems)
    rows = list(zip(*parts, strict=True))
    clean = [clean_label(value) for value in labels]
    return LabelledTexts(
        table.where,
        [join_text(row) for row in rows],
        clean,
        table.places,
        _describe(table, label, text),
        trimmed=sum(one != other for one, other in zip(clean, labels, strict=True)),
    )


def join_text(parts: Sequence[str]) -> str:
    """Join the parts of a text that are not blank by one space; a single part is unchanged.

    >>> join_text(["Oil rises", " ", "Prices rose."]), join_text([" as it is "])
    ('Oil rises Prices rose.', ' as it is ')
    """
    return parts[0] if len(parts) == 1 else " ".join(part for part in parts if part.strip())


def _choose(table: Table, options: TableOptions, *, join: bool) -> tuple[int, Places]:
    """Return the columns of the label and of the parts of the text."""
    count = len(table.names)
    if count < 2:
        table.refuse()
        raise DataError(f"{table.where}:1: one column, expected label and text: another delimiter?")

    label, text = _named(table.names, options)
    if table.first:
        label = 0
        text = tuple(range(1, count)) if join else (count - 1,)

    if label is None or text is None:
        table.refuse()
        asked = {"label": (label, options.label_column), "text": (text, options.text_column)}
        missing = {role: column for role, (name, column) in asked.items() if name is None}
        raise _no_column(table.where, table.names, missing)
    if label in text:
        raise DataError(f"{table.where}:1: label and text are both {table.names[label]!r}")

    return label, text


def _named(names: Sequence[str], options: TableOptions) -> tuple[int | None, Places | None]:
    """Return the columns of the label and the text, by the requested or the usual names, or None."""
    columns = list(names)
    folded = [name.strip().lower() for name in names]

    def places(column: str, groups: Sequence[tuple[str, ...]]) -> tuple[int, ...] | None:
        if column == AUTO:
            usual = next((group for group in groups if set(group) <= set(folded)), None)
            return tuple(map(folded.index, usual)) if usual else None
        if column in names:
            return (columns.index(column),)
        parts = [part.strip() for part in column.split(",")]
        return tuple(map(columns.index, parts)) if set(parts) <= set(names) else None

    label = places(options.label_column, [(name,) for name in LABEL_NAMES])
    one = label[0] if label and len(label) == 1 else None
    return one, places(options.text_column, TEXT_NAMES)


def _as_label(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, bool | int | float) else value


def _describe(table: Table, label: int, text: Sequence[int]) -> str:
    joined = " joined by a space" if len(text) > 1 else ""
    unread = [
        column for column in range(len(table.names)) if column != label and column not in text
    ]
    if table.first:
        columns = ("columns " if len(text) > 1 else "column ") + ", ".join(map(str, text))
        described = f"no header, label in column {label}, text in {columns}{joined}"
        left = "column " + ", ".join(map(str, unread))
    else:
        named = [repr(table.names[column]) for column in text]
        described = f"header, label {table.names[label]!r}, text {' + '.join(named)}{joined}"
        left = ", ".join(repr(table.names[column]) for column in unread)

    return described + (f"; not read: {left}" if unread else "")


def _refuse_header(table: Table) -> None:
    """Refuse a first row that looks like a header: its value in some column is unique there, and is
    a usual name or in a column of repeated values."""
    usual = {*LABEL_NAMES, *(name for names in TEXT_NAMES for name in names)}
    for number, name in enumerate(table.first):
        counts = Counter(map(str, table.column(number)[1:]))
        is_label = min(counts.values(), default=0) > 1
        if name not in counts and counts and (is_label or name.strip().lower() in usual):
            raise DataError(
                f"{table.where}:{table.places[0]}: looks like a header, as no other row has"
                f" {name!r}: {list(table.first)}; give label_column=NAME text_column=NAME, or"
                " give header='no'"
            )


def _no_column(where: str, names: Sequence[str], missing: dict[str, str]) -> DataError:
    problems = []
    heads = [name[:SHOWN] for name in names]
    for role, column in missing.items():
        usual = LABEL_NAMES if role == "label" else map(" + ".join, TEXT_NAMES)
        asked = [part for part in map(str.strip, column.split(",")) if part not in names]
        near = (f"{p[:SHOWN]!r} (nearest: {', '.join(nearest_names(p, heads))})" for p in asked)
        wanted = f"named {' or '.join(usual)}" if column == AUTO else "; ".join(near)
        problems.append(f"{where}:1: no {role} column {wanted}; give {role}_column=NAME")
    return DataError(f"the header {heads} lacks a column:\n" + listed(problems))


def sorted_labels(labels: Sequence[str]) -> list[str]:
    """Return the distinct labels, in numeric order if all are whole numbers.

    >>> sorted_labels(["10", "-1", "2", "2"])
    ['-1', '2', '10']
    """
    distinct = sorted(set(labels))
    digits = [label.removeprefix("-") for label in distinct]
    if all(digit.isascii() and digit.isdigit() and len(digit) < MAX_DIGITS for digit in digits):
        return sorted(distinct, key=int)
    return distinct
