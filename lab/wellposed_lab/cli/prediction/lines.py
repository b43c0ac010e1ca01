"""Read lines of text as strict UTF-8, and write a file that is complete or absent."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from wellposed.errors import DataError
from wellposed_lab.tasks.data.files import TextFile, decode_text
from wellposed_lab.training.folder.atomic import open_replacing

SHOWN = 10


def read_source(text: str | None, path: Path | None) -> TextFile:
    """Return the text of ``--text``, of a file (gzip too), or of standard input (``-``). A
    byte-order mark at the start of a file is removed and reported; if typed, it stays."""
    if path is None:
        stored = (text or "").encode(errors="surrogateescape")
        return decode_text(Path("--text"), stored, has_mark=False)
    if str(path) == "-":
        name = Path("standard input")
        stored = sys.stdin.buffer.read() if sys.stdin else b""
        file = decode_text(name, stored)
    else:
        file = decode_text(path)
    if "byte_order_mark_removed" in file.described:
        print(f"{file.path}: removed a byte-order mark before the text", file=sys.stderr)
    return file


def lines_of(file: TextFile) -> list[str]:
    """Return the lines of a text, which end at a line feed; no line is a `DataError`."""
    if not file.text:
        raise DataError(f"{file.path}: the file is empty; expected at least one line of text")
    return [line for _, line in file.lines()]


@contextmanager
def line_writer(output: Path | None) -> Iterator[IO[str]]:
    """Yield a file, renamed to ``output`` after the block succeeds, or standard output."""
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
    """Report on standard error the lines of more than ``limit`` tokens."""
    if numbers:
        listed = ", ".join([*map(str, numbers[:SHOWN]), *(["..."] if len(numbers) > SHOWN else [])])
        message = f"{len(numbers)} lines of more than {limit} tokens were {what}: {listed}"
        print(message, file=sys.stderr)


def say_blank(count: int, what: str) -> None:
    """Report on standard error how many lines have no text."""
    if count:
        print(f"{count} blank lines were {what}", file=sys.stderr)
