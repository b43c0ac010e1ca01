"""Files of named columns: one JSON object a line (``.jsonl``), a list of them (``.json``), or
``.parquet``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellposed.errors import DataError, listed, missing_extra
from wellposed.finite_json import from_json
from wellposed.tasks.data.files import TextFile, describe_file, read_text

SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class NamedColumns:
    """Columns by name, read as those of a `datasets.Dataset`."""

    columns: Mapping[str, Sequence[Any]]

    @property
    def column_names(self) -> list[str]:
        """Names in the order of the first object."""
        return list(self.columns)

    def __getitem__(self, name: str) -> Sequence[Any]:
        return self.columns[name]


def has_columns(path: Path) -> bool:
    """Return whether ``path`` is named as one of these files."""
    return path.name.lower().removesuffix(".gz").endswith(SUFFIXES)


def read_columns(path: Path) -> tuple[Any, dict[str, Any]]:
    """Return the columns of a file and its description; objects have the keys of the first one.

    Raises:
        DataError: a file that cannot be read, or objects that lack a key; all are named.
        ConfigError: a parquet file where `datasets` is not installed.
    """
    if path.suffix.lower() == ".parquet":
        return parquet_rows(path), describe_file(path)
    file = read_text(path)
    objects, problems = json_objects(file)
    names = list(objects[0][1]) if objects else []
    problems += [
        f"{path}:{number}: no key {' and '.join(map(repr, lacking))}"
        for number, row in objects
        if (lacking := [name for name in names if name not in row])
    ]
    refuse_rows(path, problems)
    return NamedColumns(
        {name: [row[name] for _, row in objects] for name in names}
    ), file.description()


def parquet_rows(path: Path) -> Any:
    """Return a parquet file as a `datasets.Dataset`.

    Raises:
        DataError: it cannot be read, or holds no rows.
        ConfigError: `datasets` is not installed.
    """
    try:
        import pyarrow.parquet
        from datasets import Dataset
    except ImportError as error:
        raise missing_extra("datasets", "hf", "parquet files") from error
    try:
        rows = Dataset(pyarrow.parquet.read_table(path))
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(
            f"{path}: cannot be read as parquet: {error}; copy the file again"
        ) from error
    if not len(rows):
        raise DataError(f"{path}: no rows; give a file with a row for each text")
    return rows


def json_objects(file: TextFile) -> tuple[list[tuple[int, dict[str, Any]]], list[str]]:
    """Return the objects of a JSON file with their line or number, and one line for each row that
    is none."""
    rows: list[tuple[int, dict[str, Any]]] = []
    problems: list[str] = []
    for number, row in _parsed(file):
        if isinstance(row, dict):
            rows.append((number, row))
        elif isinstance(row, ValueError):
            problems.append(f"{file.path}:{number}: not JSON: {row}")
        else:
            found = "an empty line" if row is _NOTHING else type(row).__name__
            problems.append(f"{file.path}:{number}: {found}, expected a JSON object")
    return rows, problems


_NOTHING = object()


def _parsed(file: TextFile) -> Iterable[tuple[int, Any]]:
    if file.path.name.lower().removesuffix(".gz").endswith(".jsonl"):
        return ((number, _value(line)) for number, line in file.lines())
    rows = _value(file.text)
    if isinstance(rows, ValueError):
        raise DataError(f"{file.path}: not JSON: {rows}; name it .jsonl if every line is an object")
    if not isinstance(rows, list):
        raise DataError(f"{file.path}: {type(rows).__name__}, expected a list of objects")
    return enumerate(rows, 1)


def _value(text: str) -> Any:
    try:
        return from_json(text) if text else _NOTHING
    except ValueError as error:
        return error


def strings(where: str, name: str, values: Iterable[Any]) -> list[str]:
    """Return the values of column ``name``, or raise `DataError` naming those that are no text."""
    found = list(values)
    problems = [
        f"{where}:{number}: {name!r} is {type(value).__name__}, expected a string"
        for number, value in enumerate(found, 1)
        if not isinstance(value, str)
    ]
    refuse_rows(where, problems)
    return found


def refuse_rows(where: Path | str, problems: list[str]) -> None:
    """Raise `DataError` naming every malformed row, if there are any."""
    if problems:
        raise DataError(
            f"{where}: {len(problems)} rows that cannot be used; correct or remove them:\n"
            + listed(problems)
        )
