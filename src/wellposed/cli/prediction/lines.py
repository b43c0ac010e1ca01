"""Reads lines of text as strict UTF-8, and writes a file that is complete or absent."""

from __future__ import annotations

import gzip
import io
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

from wellposed.errors import DataError
from wellposed.tasks.data.files import bounded_lines, missing_file
from wellposed.tasks.data.labelled import TableOptions, join_text, read_texts
from wellposed.training.folder.durable_files import open_replacing

SECONDS_BETWEEN_LINES = 10.0
SHOWN = 10
_GZIP_MAGIC = b"\x1f\x8b"


class LineSource:
    """Lines of a text, of a file (gzip too) or of standard input (``-``), to be read more than
    once.

    Only a line feed, with or without a carriage return before it, ends a line. Standard input is
    spooled to disk.
    """

    def __init__(self, *, text: str | None, path: Path | None) -> None:
        self._file: IO[bytes]
        self.name = "--text" if path is None else str(path)
        if path is None:
            self._file = io.BytesIO((text or "").encode(errors="surrogateescape"))
        elif str(path) == "-":
            self.name = "standard input"
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the source)
            shutil.copyfileobj(sys.stdin.buffer, self._file)
        elif path.is_file():
            self._file = path.open("rb")
        elif path.exists():
            raise DataError(f"{path}: expected a file, found a folder, a pipe or a device")
        else:
            raise missing_file(path)

    def __enter__(self) -> LineSource:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[str]:
        self._file.seek(0)
        zipped = self._file.read(2) == _GZIP_MAGIC
        self._file.seek(0)
        file = gzip.GzipFile(fileobj=self._file) if zipped else self._file
        number, raw = 0, b""
        try:
            for raw in bounded_lines(self.name, file):
                number += 1
                yield raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.name}:{number}: not UTF-8: byte 0x{raw[error.start]:02x} at byte"
                f" {error.start + 1} of the line; convert the file, for example with: iconv"
                " -f LATIN1 -t UTF-8"
            ) from None
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(
                f"{self.name}: the gzip data is damaged or cut short ({error}); copy the file again"
            ) from None


def column_lines(path: Path, model: str, text_column: str, *, pairs: bool) -> list[str] | None:
    """Return the texts of a file of columns, those of a pair with a tab between, and say which
    column they are; None for a file of lines.

    Args:
        path: the file.
        model: what was named as the model; a run folder says which columns it was trained on.
        text_column: the column to read instead.
        pairs: whether the model compares pairs.
    """
    from wellposed.training.folder.run_folder import CONFIG, read_config

    run = Path(model)
    trained = read_config(run).task_options if (run / CONFIG).is_file() else {}
    kept: dict[str, Any] = {n: trained[n] for n in ("text_column", "header") if n in trained}
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


def counted(chunks: Iterable[list[str]], total: int) -> Iterator[list[str]]:
    """Yield chunks of lines and show on standard error how many are done: a bar on a terminal, a
    line every ten seconds elsewhere."""
    done, began = 0, time.monotonic()
    shown, bar = began, None
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        bar = Progress(console=Console(stderr=True), transient=True)
        bar.add_task("lines", total=total)
    with bar or nullcontext():
        for chunk in chunks:
            yield chunk
            done += len(chunk)
            now = time.monotonic()
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done)
            elif now - shown >= SECONDS_BETWEEN_LINES:
                shown, speed = now, done / (now - began)
                said = f"{done}/{total} lines, {speed:.3g} per second"
                print(said, file=sys.stderr, flush=True)
