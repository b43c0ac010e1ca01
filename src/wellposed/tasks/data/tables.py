"""Labelled texts from csv, tsv and jsonl files; every malformed row is named with file:line, none
is dropped.

Rules, in full:

- ``.jsonl``: one JSON object a line; ``.json``: a list of them, named by their number;
``.parquet``: columns.
  ``.tsv``: fields between tabs, quotes are ordinary characters. ``.csv``: fields
  between commas (tabs, where the first line holds a tab and no comma), quoted as in RFC 4180: a
  quote is doubled, a backslash is an ordinary character. ``quoting`` overrides.
- The first line is a header when it holds a name for the label and a name for the text: the names
given as options, or
  else one of `LABEL_NAMES` and one of `TEXT_NAMES`, in any case. A title and a description, say,
  are joined by a space.
- Without a header the label is the first column. The text is the last column of a ``.tsv``; in a
``.csv`` it is every
  column after the label, joined by a space, as in the releases of Zhang et al. 2015 (AG News,
  DBpedia, Yahoo, Yelp,
  Amazon: class, title, text). A column option may also be a number from 0; the text several,
  between commas.
- Every line has as many fields as the first one; an empty line is malformed.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wellposed.errors import DataError, listed
from wellposed.tasks.data import column_files
from wellposed.tasks.data.columns import (
    TableOptions,
    describe_names,
    find_columns,
    find_keys,
    join_text,
    paired,
)

if TYPE_CHECKING:
    from pathlib import Path

    from wellposed.tasks.data.files import TextFile

SUFFIXES = (".tsv", ".csv", *column_files.SUFFIXES)


@dataclass(frozen=True)
class LabelledTexts:
    """Texts with their labels."""

    path: str
    texts: Sequence[str]
    labels: Sequence[str]
    places: Sequence[int] | Sequence[str]
    """The line of ``path`` that each text starts at; or its file below ``path``."""
    columns: str
    """How label and text were found, for the description."""
    pairs: Sequence[tuple[str, str]] | None = None
    """The two texts of each row, where they are a pair; `texts` holds them joined."""

    def __len__(self) -> int:
        return len(self.texts)

    def where(self, index: int) -> str:
        """Return file:line of a text, or its file."""
        place = self.places[index]
        return f"{self.path}/{place}" if isinstance(place, str) else f"{self.path}:{place}"

    def select(self, indices: Sequence[int]) -> LabelledTexts:
        """Return the texts at ``indices``."""
        texts, labels = ([column[i] for i in indices] for column in (self.texts, self.labels))
        places: Any = [self.places[i] for i in indices]
        pairs = None if self.pairs is None else [self.pairs[i] for i in indices]
        return LabelledTexts(self.path, texts, labels, places, self.columns, pairs)


def read_table(file: TextFile, options: TableOptions) -> LabelledTexts:
    """Read a csv, tsv or jsonl file (``.gz`` too) by the rules of this module; all malformed rows
    are named at once."""
    name = file.path.name.lower().removesuffix(".gz")
    if column_files.has_columns(file.path):
        return _read_objects(file, options)
    if not name.endswith((".tsv", ".csv")):
        raise DataError(
            f"{file.path}: expected a name that ends in {', '.join(SUFFIXES)}, each with or"
            " without .gz"
        )
    quoted = options.quoting == "csv" or (options.quoting == "auto" and name.endswith(".csv"))
    first = file.text.split("\n", 1)[0]
    delimiter = "\t" if name.endswith(".tsv") or ("\t" in first and "," not in first) else ","
    plain = ((number, line.split(delimiter) if line else []) for number, line in file.lines())
    return _read_fields(file, quoted_rows(file, delimiter) if quoted else plain, options)


def quoted_rows(
    file: TextFile,
    delimiter: str,
    *,
    what: str = "a row of quoted fields",
    remedy: str = "give quoting='none' if quotes are ordinary characters",
) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of quoted fields of a file and the line each starts at; a field may be as long
    as the file."""
    limit = csv.field_size_limit(max(len(file.text), 1))
    reader = csv.reader(io.StringIO(file.text, newline=""), delimiter=delimiter, strict=True)
    try:
        while True:
            line = reader.line_num + 1
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise DataError(f"{file.path}:{line}: not {what}: {error}; {remedy}") from None
            yield line, row
    finally:
        csv.field_size_limit(limit)


def _read_fields(
    file: TextFile, rows: Iterator[tuple[int, list[str]]], options: TableOptions
) -> LabelledTexts:
    first_line, first = next(rows)
    join = file.path.name.lower().removesuffix(".gz").endswith(".csv")
    columns = find_columns(f"{file.path}:{first_line}", first, options, join=join)
    parts, labels, lines, problems = [], [], [], []
    for line, row in rows if columns.is_header else itertools.chain([(first_line, first)], rows):
        if len(row) != len(first):
            found = f"{len(row)} columns" if row else "an empty line"
            problems.append(
                f"{file.path}:{line}: {found}, expected {len(first)} columns as in line"
                f" {first_line}"
            )
            continue
        parts.append([row[place] for place in columns.text])
        labels.append(row[columns.label])
        lines.append(line)
    texts, pairs = _texts(parts, options)
    table = LabelledTexts(str(file.path), texts, labels, lines, columns.described, pairs)
    if columns.is_header and not parts and not problems:
        raise DataError(f"{file.path}: a header and no rows; give a file with a row for each text")
    if options.header == "auto" and not columns.is_header:
        _refuse_unseen_header(table, first)
    column_files.refuse_rows(file.path, problems + _blank_labels(table))
    return table


def read_parquet(path: Path, options: TableOptions) -> LabelledTexts:
    """Read a parquet file as a data set of the hub; rows are numbered from 1."""
    return table_from_hub(column_files.parquet_rows(path), str(path), options)


def _read_objects(file: TextFile, options: TableOptions) -> LabelledTexts:
    parts: list[list[str]] = []
    labels: list[str] = []
    lines: list[int] = []
    keys: tuple[str, tuple[str, ...]] | None = None
    objects, problems = column_files.json_objects(file)
    for number, row in objects:
        where = f"{file.path}:{number}"
        keys = keys or find_keys(where, list(row), options)
        problem = _json_problem(row, *keys)
        if problem:
            problems.append(f"{where}: {problem}")
            continue
        labels.append(_label_text(row[keys[0]]))
        parts.append([row[key] for key in keys[1]])
        lines.append(number)
    columns = (
        f"JSON keys, label {keys[0]!r}, text {describe_names(keys[1], options)}" if keys else ""
    )
    texts, pairs = _texts(parts, options)
    table = LabelledTexts(str(file.path), texts, labels, lines, columns, pairs)
    column_files.refuse_rows(file.path, problems + _blank_labels(table))
    return table


def _json_problem(row: dict[str, Any], label: str, text: Sequence[str]) -> str | None:
    missing = [key for key in (label, *text) if key not in row]
    if missing:
        return (
            f"no key {' and '.join(map(repr, missing))}; it has"
            f" {', '.join(map(repr, row)) or 'none'}"
        )
    for key in text:
        if not isinstance(row[key], str):
            return f"{key!r} is {type(row[key]).__name__}, expected a string"
    if not isinstance(row[label], str | int | bool | float):
        return (
            f"{label!r} is {type(row[label]).__name__}, expected a string, a number or true/false"
        )
    return None


def _label_text(label: str | int | bool | float) -> str:
    return label if isinstance(label, str) else json.dumps(label)


def table_from_hub(rows: Any, where: str, options: TableOptions) -> LabelledTexts:
    """Read label and text of a `datasets.Dataset`; class labels get their names, "lines" are row
    numbers from 1."""
    names = list(rows.column_names)
    label, text = find_keys(where, names, options)
    values = rows[label]
    to_name = getattr(rows.features[label], "int2str", None)
    problems = []
    labels = []
    for number, value in enumerate(values, 1):
        if value is None or (to_name is not None and value < 0):
            problems.append(f"{where}:{number}: the row has no label")
        else:
            labels.append(to_name(value) if to_name is not None else _label_text(value))
    if problems:
        raise DataError("rows that cannot be used:\n" + listed(problems))
    columns = f"data set columns, label {label!r}, text {describe_names(text, options)}"
    texts, pairs = _texts(list(zip(*(rows[name] for name in text), strict=True)), options)
    return LabelledTexts(where, texts, labels, range(1, len(labels) + 1), columns, pairs)


def _texts(
    parts: Sequence[Sequence[str]], options: TableOptions
) -> tuple[list[str], list[tuple[str, str]] | None]:
    """Return the columns of the text of each row joined, and as pairs where they are that."""
    pairs = [pair for row in parts if (pair := paired(row, options)) is not None]
    return [join_text(row) for row in parts], pairs or None


def _blank_labels(table: LabelledTexts) -> list[str]:
    return [
        f"{table.where(i)}: the label is empty"
        for i, label in enumerate(table.labels)
        if not label.strip()
    ]


def _refuse_unseen_header(table: LabelledTexts, first: list[str]) -> None:
    """Refuse a first row that looks like a header of unknown names: its label is empty, or alone in
    being seen once."""
    counts = Counter(table.labels)
    label = table.labels[0]
    others = [count for other, count in counts.items() if other != label]
    if not label.strip() or (counts[label] == 1 and others and min(others) > 1):
        raise DataError(
            f"{table.where(0)}: looks like a header, as no other row has its label {label!r}:"
            f" {first}; name the columns with label_column=NAME and text_column=NAME, or give"
            " header='no'"
        )
