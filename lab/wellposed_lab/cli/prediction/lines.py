"""Reads lines of text as strict UTF-8, and writes a file that is complete or absent."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from wellposed.errors import DataError
from wellposed_lab.tasks.data.files import TextFile, decode_text
from wellposed_lab.tasks.data.labelled import TableOptions, join_text, read_texts
from wellposed_lab.training.folder.durable_files import open_replacing

SECONDS_BETWEEN_LINES = 10.0
SHOWN = 10


def read_source(text: str | None, path: Path | None) -> TextFile:
    """Return a text as it was typed, that of a file (gzip too), or of standard input (``-``).

    A byte-order mark belongs to the first bytes of a file: it is taken off and reported there. In a
    text that was typed U+FEFF is a character like any other, so that no word is lost.
    """
    if path is None:
        stored = (text or "").encode(errors="surrogateescape")
        return decode_text(Path("--text"), stored, has_mark=False)
    if str(path) == "-":
        name, stored = Path("standard input"), sys.stdin.buffer.read() if sys.stdin else b""
        file = decode_text(name, stored)
    else:
        file = decode_text(path)
    if "byte_order_mark_removed" in file.described:
        print(f"{file.path}: a byte-order mark before the text was not read", file=sys.stderr)
    return file


def lines_of(file: TextFile) -> list[str]:
    """Return the lines of a text; only a line feed, with or without a carriage return before it, ends
    one.

    Raises:
        DataError: there is none.
    """
    if not file.text:
        raise DataError(f"{file.path}: the file is empty; expected at least one line of text")
    return [line for _, line in file.lines()]


def column_lines(path: Path, model: str, text_column: str, *, pairs: bool) -> list[str] | None:
    """Return the texts of a file of columns, those of a pair with a tab between, and say which
    column they are; None for a file of lines.

    Args:
        path: the file.
        model: what was named as the model; a run folder says which columns it was trained on.
        text_column: the column to read instead.
        pairs: whether the model compares pairs.
    """
    from wellposed_lab.training.folder.run_folder import CONFIG, read_config

    run = Path(model)
    trained = read_config(run).task_options if (run / CONFIG).is_file() else {}
    names = ("text_column", "header", "quoting")
    kept: dict[str, Any] = {name: trained[name] for name in names if name in trained}
    if text_column:
        kept["text_column"] = text_column
    found = read_texts(path, TableOptions(**kept))
    if found is None:
        return None
    rows, what = found
    print(what, file=sys.stderr)
    if pairs and rows and len(rows[0]) == 2:
        return ["\t".join(part.replace("\t", " ") for part in row) for row in rows]
    return [join_text(row) for row in rows]


@contextmanager
def line_writer(output: Path | None) -> Iterator[IO[str]]:
    """Yield a file that becomes ``output`` in one rename when the block ends well; standard output
    where not given."""
    if output is None:
        yield sys.stdout
        return
    if output.is_dir():
        raise DataError(f"{output}: is a folder, expected the name of a file to write")
    if not output.parent.is_dir():
        raise DataError(f"{output}: the folder {output.parent} does not exist; make it first")
    with open_replacing(output) as raw:
        file = io.TextIOWrapper(raw, encoding="utf-8", newline="\n")
        yield file
        file.detach()  # flushed; `raw` is synced and closed by its owner


def say_long(numbers: Sequence[int], limit: int | None, what: str = "cut to their start") -> None:
    """Say on standard error what happened to the lines of more than ``limit`` tokens."""
    if numbers:
        shown = ", ".join([*map(str, numbers[:SHOWN]), *(["..."] if len(numbers) > SHOWN else [])])
        said = f"{len(numbers)} lines of more than {limit} tokens were {what}: {shown}"
        print(said, file=sys.stderr)


def say_blank(count: int, what: str) -> None:
    """Say on standard error what happened to ``count`` lines without text."""
    if count:
        print(f"{count} blank lines were {what}", file=sys.stderr)


def counted(chunks: Sequence[list[str]]) -> Iterator[list[str]]:
    """Yield chunks of lines; on standard error a bar shows how far they are, every ten seconds if
    that is no terminal."""
    from tqdm import tqdm

    seconds = 0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES
    with tqdm(
        total=sum(map(len, chunks)), unit=" lines", mininterval=seconds, delay=seconds
    ) as bar:
        for chunk in chunks:
            yield chunk
            bar.update(len(chunk))
