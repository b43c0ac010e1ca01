"""Labelled texts: which columns of a table hold the label and the text, and what they hold.

The first line of a csv or tsv is a header if it holds the names that were asked for, or one of
`LABEL_NAMES` and one of `TEXT_NAMES`, in any case; a first line that looks like a header of other
names is refused.
Without a header the label is the first column; the text is the last one of a tsv and every column
after the label of a csv, joined by a space, as in the releases of Zhang et al. 2015 (AG News,
DBpedia, Yahoo, Yelp, Amazon: class, title, text).
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from wellposed.errors import ConfigError, DataError, listed, nearest_names
from wellposed.options import CheckedOptions
from wellposed_lab.tasks.data import files, splits
from wellposed_lab.tasks.data.files import Table
from wellposed_lab.tasks.data.splits import DataOptions, Described

Places: TypeAlias = tuple[int, ...]
_MORE = ("class index", "topic")
LABEL_NAMES = ("label", "labels", "target", "class", "sentiment", "category", *_MORE)
TEXT_NAMES = (
    *(("text",), ("sentence",), ("source",), ("review",), ("title", "description")),
    *(("title", "content"), ("title", "body")),
    ("question_title", "question_content", "best_answer"),
    *(("content",), ("document",), ("headline",), ("body",)),
)
"""The first of these that a header holds whole is the text."""
AUTO, SHOWN = "auto", 60
MAX_DIGITS = 4000
"""Python reads no whole number of more digits than some 4,300; longer labels sort as texts."""
logger = logging.getLogger("wellposed_lab.tasks")


@dataclass(frozen=True)
class TableOptions(CheckedOptions):
    """How a table of labels and texts is read."""

    label_column: str = AUTO
    """Name of the label column."""
    text_column: str = AUTO
    """Name; several between commas are joined by a space."""
    header: Literal["auto", "yes", "no"] = "auto"
    """Whether the first line names the columns; auto looks for the names of a label and of a text column."""


@dataclass(frozen=True)
class LabelledTexts:
    """Texts with their labels."""

    path: str
    texts: Sequence[str]
    labels: Sequence[str]
    places: Sequence[int] | Sequence[str]
    """The line of ``path`` that each text starts at; or the file that it is of."""
    columns: str
    """How label and text were found, for the description."""

    def __len__(self) -> int:
        return len(self.texts)

    def where(self, index: int) -> str:
        """Return file:line of a text."""
        return f"{self.path}:{self.places[index]}"

    def select(self, indices: Sequence[int]) -> LabelledTexts:
        """Return the texts at ``indices``."""
        texts, labels = ([column[i] for i in indices] for column in (self.texts, self.labels))
        places: Any = [self.places[i] for i in indices]
        return replace(self, texts=texts, labels=labels, places=places)


def load_labelled(
    options: DataOptions, table: TableOptions | None = None
) -> splits.Loaded[LabelledTexts]:
    """Read the labelled texts of the splits, cut missing ones from train, and describe where they
    came from."""
    columns = table or TableOptions()

    def read_file(path: Path) -> tuple[LabelledTexts, Described]:
        found, described = files.read_table(
            path, has_header=lambda first: is_header(first, columns)
        )
        texts = label_rows(found, columns, join=files.is_named(path, ".csv"))
        logger.info("%s: %s", path, texts.columns)
        return texts, described | {"columns": texts.columns}

    tables, described = splits.load_splits(
        options,
        suffixes=files.TABLE_SUFFIXES,
        read_file=read_file,
        read_hub=lambda rows, where: label_rows(files.hub_table(rows, where), columns),
    )
    return splits.cut_missing(tables, tables["train"].path, described)


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
    """Return the labelled texts of a table, or raise naming every row that cannot be used.

    ``join`` says whether the text of a table without a header is every column after the label, not
    the last one alone.
    """
    if table.first and options.header == "auto":
        _refuse_header(table)
    label, text = _choose(table, options, join=join)
    labels, problems = table.texts(label, _as_label)
    problems += [
        f"{table.where}:{place}: the label is empty"
        for place, value in zip(table.places, labels, strict=True)
        if isinstance(value, str) and not value.strip()
    ]
    parts = []
    for place in text:
        values, wrong = table.texts(place)
        parts.append(values)
        problems += wrong
    table.refuse(problems)
    rows = list(zip(*parts, strict=True))
    return LabelledTexts(
        table.where,
        [join_text(row) for row in rows],
        labels,
        table.places,
        _describe(table, label, text),
    )


def join_text(parts: Sequence[str]) -> str:
    """Join the parts of a text that are not blank by one space; a single part stays as it is.

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
        label, text = 0, tuple(range(1, count)) if join else (count - 1,)
    if label is None or text is None:
        table.refuse()
        asked = {"label": (label, options.label_column), "text": (text, options.text_column)}
        missing = {role: column for role, (found, column) in asked.items() if found is None}
        raise _no_column(table.where, table.names, missing)
    if label in text:
        raise DataError(f"{table.where}:1: label and text are both {table.names[label]!r}")
    return label, text


def _named(names: Sequence[str], options: TableOptions) -> tuple[int | None, Places | None]:
    """Return the columns that are asked for by name, or named as usual, where there are."""
    held, folded = list(names), [name.strip().lower() for name in names]

    def places(column: str, known: Sequence[tuple[str, ...]]) -> tuple[int, ...] | None:
        if column == AUTO:
            usual = next((each for each in known if set(each) <= set(folded)), None)
            return tuple(map(folded.index, usual)) if usual else None
        if column in names:
            return (held.index(column),)
        parts = [part.strip() for part in column.split(",")]
        return tuple(map(held.index, parts)) if set(parts) <= set(names) else None

    label = places(options.label_column, [(name,) for name in LABEL_NAMES])
    one = label[0] if label and len(label) == 1 else None
    return one, places(options.text_column, TEXT_NAMES)


def _as_label(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, bool | int | float) else value


def _describe(table: Table, label: int, text: Sequence[int]) -> str:
    """Return what was taken for the label and the text, and what was not read."""
    how = " joined by a space" if len(text) > 1 else ""
    unread = [place for place in range(len(table.names)) if place != label and place not in text]
    if table.first:
        columns = ("columns " if len(text) > 1 else "column ") + ", ".join(map(str, text))
        described = f"no header, label in column {label}, text in {columns}{how}"
        left = "column " + ", ".join(map(str, unread))
    else:
        named = [repr(table.names[place]) for place in text]
        described = f"header, label {table.names[label]!r}, text {' + '.join(named)}{how}"
        left = ", ".join(repr(table.names[place]) for place in unread)
    return described + (f"; not read: {left}" if unread else "")


def _refuse_header(table: Table) -> None:
    """Refuse a first row that looks like a header: no other row has its value in a column with a
    usual name, or in one whose other values repeat."""
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
    problems, shown = [], [name[:SHOWN] for name in names]
    for role, column in missing.items():
        usual = LABEL_NAMES if role == "label" else map(" + ".join, TEXT_NAMES)
        asked = [part for part in map(str.strip, column.split(",")) if part not in names]
        near = (f"{p[:SHOWN]!r} (nearest: {', '.join(nearest_names(p, shown))})" for p in asked)
        wanted = f"named {' or '.join(usual)}" if column == AUTO else "; ".join(near)
        problems.append(f"{where}:1: no {role} column {wanted}; give {role}_column=NAME")
    return DataError(f"the header {shown} lacks a column:\n" + listed(problems))


def sorted_labels(labels: Sequence[str]) -> list[str]:
    """Return the distinct labels, as numbers in order if all are whole numbers.

    >>> sorted_labels(["10", "-1", "2", "2"])
    ['-1', '2', '10']
    """
    distinct = sorted(set(labels))
    digits = [label.removeprefix("-") for label in distinct]
    if all(each.isascii() and each.isdigit() and len(each) < MAX_DIGITS for each in digits):
        return sorted(distinct, key=int)
    return distinct
