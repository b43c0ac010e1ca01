"""Text or columns of plain or gzip files in strict UTF-8, identified by their sha256. Every
malformed row is an error with file:line; no row is dropped."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from wellposed import safe_read
from wellposed.errors import DataError, import_extra, listed, nearest_names
from wellposed.finite_json import from_json
from wellposed_lab.tasks.data.separators import find_separator

TABLE_SUFFIXES = (".tsv", ".csv", ".jsonl", ".parquet")

BOM = "\ufeff"
_GZIP_MAGIC = b"\x1f\x8b"
_BLOCK = 1 << 20
BOMB_BYTES = 1 << 28
BOMB_RATIO = 100
"""Limits on unpacked data: this many bytes, or this multiple of the packed size if that is more."""
# Bytes of UTF-8 and LATIN1 texts: line ends, tabs, form feeds, ESC, and the space and above.
_TEXT_BYTES = bytes([*range(8, 14), 27, *range(32, 256)])


@dataclass(frozen=True)
class TextFile:
    """A decoded file and its identity."""

    path: Path
    text: str
    described: dict[str, Any]
    """Path, sha256 and size of the stored bytes, and whether a byte-order mark was removed."""

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield numbered lines, which end at a line feed (with or without a carriage return)."""
        for number, line in enumerate(self.text.removesuffix("\n").split("\n"), start=1):
            yield number, line.removesuffix("\r")


def describe_file(path: Path, stored: bytes | None = None) -> dict[str, Any]:
    """Return path, sha256 and size of a file, or of its bytes ``stored``."""
    stored = path.read_bytes() if stored is None else stored
    return {"path": str(path), "sha256": hashlib.sha256(stored).hexdigest(), "bytes": len(stored)}


def read_text(path: Path) -> TextFile:
    """Return a file as `decode_text` does, or refuse it if it has no text."""
    file = decode_text(path)
    if not file.text.strip():
        problem = "holds white space only" if file.text else "is empty"
        raise DataError(f"{path}: the file {problem}; give a file that holds text")
    return file


def decode_text(path: Path, stored: bytes | None = None, *, has_mark: bool = True) -> TextFile:
    """Return a UTF-8 file, or bytes called ``path``, plain or gzip, as text. Line ends stay. With
    ``has_mark``, a byte-order mark is removed (typed text has none). Else `DataError`."""
    if stored is None:
        try:
            stored = safe_read.read_bytes(path)
        except FileNotFoundError:
            raise missing_file(path) from None
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None

    content = _gunzip(path, stored)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, content, error) from None

    described = describe_file(path, stored)
    if has_mark and text.startswith(BOM):
        text = text[1:]
        described["byte_order_mark_removed"] = True
    return TextFile(path, text, described)


def _gunzip(path: Path, stored: bytes) -> bytes:
    if not stored.startswith(_GZIP_MAGIC):
        if path.suffix == ".gz" and stored:
            raise DataError(f"{path}: is named .gz but is not gzip; rename it if it is plain text")
        return stored
    content = io.BytesIO()
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(stored)) as file:
            while block := file.read(_BLOCK):
                content.write(block)
                refuse_bomb(path, len(stored), content.tell())
        return content.getvalue()
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path}: gzip damaged or cut short ({error}); copy it again") from None


def refuse_bomb(path: Path, stored: int, unpacked: int) -> None:
    """Refuse packed data that grows too large, before it fills the memory."""
    if unpacked > max(BOMB_BYTES, BOMB_RATIO * stored):
        raise DataError(
            f"{path}: its {stored:,} bytes unpack to more than {BOMB_RATIO} times as many,"
            f" {unpacked:,} so far, too many for a text or image; unpack it yourself if you trust it"
        )


def _not_utf8(path: Path, content: bytes, error: UnicodeDecodeError) -> DataError:
    line = content.count(b"\n", 0, error.start) + 1
    column = error.start - content.rfind(b"\n", 0, error.start)
    hint = "convert it with, for example: iconv -f LATIN1 -t UTF-8"
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        hint = "the file looks like UTF-16; convert it with: iconv -f UTF-16 -t UTF-8"
    elif content.translate(None, _TEXT_BYTES):
        hint = "the file has control bytes, so it is no text; give a text file"
    return DataError(
        f"{path}:{line}: not UTF-8: byte 0x{content[error.start]:02x} at byte {column} of the line,"
        f" byte offset {error.start} of the file ({error.reason}); {hint}"
    )


def missing_file(path: Path) -> DataError:
    """Return the error for a missing path, with the nearest names in its deepest folder."""
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    wanted = path.relative_to(folder).parts[0] if path != folder else path.name
    neighbours = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    near = ", ".join(nearest_names(wanted, neighbours))
    hint = f"nearest in {folder}: {near}" if near else f"{folder} holds nothing"
    return DataError(f"{path}: no such file or folder; {hint}")


Column: TypeAlias = Callable[[int], Sequence[Any]]


@dataclass(frozen=True)
class Table:
    """Rows of a file, or of a split of a hub data set, as columns."""

    where: str
    """Name in error messages: the path, or the data set and the split."""
    names: tuple[str, ...]
    """Names of the columns; without a header, their numbers from 0."""
    column: Column
    """Returns the values of a column by number; `Missing` if a row has none."""
    places: Sequence[int]
    """The line of the file, or the number from 1, of each row."""
    problems: Sequence[str] = ()
    """Rows that could not be read; `refuse` lists them with those that cannot be used."""
    first: Sequence[str] = ()
    """First row, unless it is a header."""

    def refuse(self, problems: Sequence[str] = ()) -> None:
        """Raise `DataError` with every row that cannot be read or used, if there are any."""
        refuse_rows(self.where, [*self.problems, *problems])

    def strings(self, name: str) -> list[str]:
        """Return the texts of a column, or raise `DataError` with every row that has none."""
        values, problems = self.texts(self.names.index(name))
        self.refuse(problems)
        return values

    def texts(
        self, number: int, read: Callable[[Any], Any] = lambda value: value
    ) -> tuple[list[str], list[str]]:
        """Return the values of a column after ``read``, and a line for each that is no text."""
        name = self.names[number]
        values = list(map(read, self.column(number)))
        problems = [
            f"{self.where}:{line}: {problem}"
            for line, value in zip(self.places, values, strict=True)
            if (problem := _not_text(value, name))
        ]
        return values, problems


@dataclass(frozen=True)
class Missing:
    """Stands for a key that a row lacks; ``names`` are the keys it has."""

    names: tuple[str, ...]


_SURROGATE = re.compile("[\ud800-\udfff]")


def _not_text(value: Any, name: str) -> str | None:
    """Return why a value of the column ``name`` is no text, or None."""
    if isinstance(value, Missing):
        return f"no key {name!r}; it has {', '.join(map(repr, value.names)) or 'none'}"
    if value is None:
        return f"the row has no {name!r}"
    if not isinstance(value, str):
        return f"{name!r} is {type(value).__name__}, expected a string"
    if not value.isascii() and (lone := _SURROGATE.search(value)):
        return f"{name!r} has half a character, {lone[0]!r}, which is not valid UTF-8"
    return None


def refuse(what: str, problems: Sequence[str]) -> None:
    """Raise `DataError` with ``what`` and every problem, if there are any."""
    if problems:
        raise DataError(f"{what}:\n" + listed(problems))


def refuse_rows(where: Path | str, problems: Sequence[str]) -> None:
    """Raise `DataError` with every malformed row, if there are any."""
    what = f"{where}: {len(problems)} rows that cannot be used; correct or remove them"
    refuse(what, problems)


def is_named(path: Path, *suffixes: str) -> bool:
    """Return whether ``path`` ends in one of ``suffixes``, perhaps with ``.gz``."""
    return path.name.lower().removesuffix(".gz").endswith(suffixes)


def read_table(
    path: Path,
    *,
    has_header: Callable[[Sequence[str]], bool] | None = None,
    names: tuple[str, ...] = (),
) -> tuple[Table, dict[str, Any]]:
    """Read a csv, tsv, jsonl or parquet file as columns, and describe it. Blank rows are counted.

    In a csv or tsv every line has as many fields as the first, which is a header unless
    ``has_header`` returns False or there are ``names``. A ``.tsv`` is separated by tabs, and quotes
    are ordinary characters. A ``.csv`` is separated by commas, tabs, semicolons or bars, whichever
    cuts all lines alike (see `find_separator`), and quoted as in RFC 4180. In a ``.jsonl`` every line is an object.
    pyarrow's reader of csv is not used: it takes ``"a" b`` for ``a b`` and counts rows, not lines.

    Raises:
        DataError: a file that cannot be read, or has another suffix.
        ConfigError: a parquet file, and `datasets` is not installed.
    """
    if is_named(path, ".parquet"):
        return hub_table(_parquet(path), str(path)), describe_file(path)
    file = read_text(path)
    if is_named(path, ".jsonl"):
        return _counted(file, *_objects(file))
    if not is_named(path, ".tsv", ".csv"):
        raise DataError(f"{path}: expected a name in {', '.join(TABLE_SUFFIXES)}, perhaps with .gz")
    rows = ((number, line.split("\t") if line else []) for number, line in file.lines())
    if is_named(path, ".csv"):
        rows = _quoted_rows(file, find_separator(file.text, str(path)))
    table, blank = _fields(path, rows, has_header, names)
    return _counted(file, table, blank)


def _counted(file: TextFile, table: Table, blank: int) -> tuple[Table, dict[str, Any]]:
    return table, file.described | ({"blank_rows_skipped": blank} if blank else {})


def _is_blank(row: Sequence[str]) -> bool:
    return not any(cell.strip() for cell in row)


def _quoted_rows(file: TextFile, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of quoted fields and their first lines; a field may be as long as the file."""
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
                raise DataError(
                    f"{file.path}:{line}: not a row of quoted fields: {error}; double the quotes"
                    " inside, or write the columns as .tsv, whose quotes are ordinary characters"
                ) from None
            yield line, row
    finally:
        csv.field_size_limit(limit)


def _fields(
    path: Path,
    rows: Iterator[tuple[int, list[str]]],
    has_header: Callable[[Sequence[str]], bool] | None,
    fixed: tuple[str, ...],
) -> tuple[Table, int]:
    """Return the rows as columns, and how many blank ones were skipped."""
    lines = list(rows)
    line, first = next((numbered for numbered in lines if not _is_blank(numbered[1])), (0, []))
    headed = bool(first) and not fixed and (has_header is None or has_header(first))
    names = fixed or (tuple(first) if headed else tuple(map(str, range(len(first)))))
    why = f": {', '.join(fixed)}" if fixed else f" as in line {line}"
    complete = []
    places = []
    problems = []
    blank = 0
    for number, row in lines:
        if headed and number <= line:
            continue
        if _is_blank(row):
            blank += 1
        elif len(row) == len(names):
            complete.append(row)
            places.append(number)
        else:
            problems.append(f"{path}:{number}: {len(row)} columns, expected {len(names)}{why}")

    if not complete and not problems:
        what = "a header and no rows" if headed else "no rows"
        raise DataError(f"{path}: {what}; give a file with a row for each text")

    columns = list(zip(*complete, strict=True)) or [()] * len(names)
    unknown = () if headed else first
    return Table(str(path), names, columns.__getitem__, places, problems, unknown), blank


def _objects(file: TextFile) -> tuple[Table, int]:
    """Read each line of a ``.jsonl`` as an object; return columns and the number of blank lines."""
    rows: list[dict[str, Any]] = []
    places: list[int] = []
    problems: list[str] = []
    blank = 0
    for number, line in file.lines():
        if not line.strip():
            blank += 1
            continue
        try:
            value = from_json(line, any_number=True)
        except ValueError as error:
            problems.append(f"{file.path}:{number}: not JSON: {error}")
            continue
        if isinstance(value, dict):
            rows.append(value)
            places.append(number)
        else:
            kind = type(value).__name__
            problems.append(f"{file.path}:{number}: {kind}, expected a JSON object")
    names = tuple(dict.fromkeys(name for row in rows for name in row))

    return Table(str(file.path), names, objects_column(rows, names), places, problems), blank


def objects_column(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> Column:
    """Return the function from the number of a name to its values in ``rows``."""

    def column(number: int) -> list[Any]:
        name = names[number]
        return [row[name] if name in row else Missing(tuple(row)) for row in rows]

    return column


def _parquet(path: Path) -> Any:
    library = import_extra("datasets", "datasets", "parquet files")
    import pyarrow.parquet

    try:
        rows = library.Dataset(pyarrow.parquet.read_table(path))
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as parquet: {error}; copy it again") from error
    if not len(rows):
        raise DataError(f"{path}: no rows; give a file with a row for each text")
    return rows


def hub_table(rows: Any, where: str) -> Table:
    """Return a `datasets.Dataset` as columns; classes become names, rows are numbered from 1."""
    names = tuple(rows.column_names)

    def column(number: int) -> list[Any]:
        name = names[number]
        try:
            values = list(rows[name])
        except UnicodeDecodeError:
            one = rows.select_columns([name])
            read = 0
            with suppress(UnicodeDecodeError):
                for read in range(len(one)):
                    _ = one[read]
            raise DataError(
                f"{where}:{read + 1}: {name!r} holds bytes that are not UTF-8; write the file again"
                " from texts"
            ) from None

        to_name = getattr(rows.features[name], "int2str", None)
        if to_name is None:
            return values
        return [None if value is None or value < 0 else to_name(value) for value in values]

    return Table(where, names, column, range(1, len(rows) + 1))
