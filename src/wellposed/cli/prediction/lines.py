"""Lines read and written back: numbered, strict UTF-8, streamed, complete under the final name or
absent."""

from __future__ import annotations

import gzip
import io
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

from wellposed.errors import DataError, nearest_names
from wellposed.tasks.data.files import bounded_lines
from wellposed.tasks.data.labelled import TableOptions, join_text, read_texts
from wellposed.training.folder.durable_files import open_replacing

SECONDS_BETWEEN_LINES = 10.0
_GZIP_MAGIC = b"\x1f\x8b"


class LineSource:
    """Lines of a text, of a file (gzip too) or of standard input (``-``), to be read more than
    once.

    Only a line feed, with or without a carriage return before it, ends a line. Standard input is
    spooled to disk.
    """

    def __init__(self, *, text: str | None, path: Path | None) -> None:
        self._text = text
        self._path = path
        self._spool: IO[bytes] | None = None
        self.name = "--text" if path is None else str(path)
        if path is not None and str(path) == "-":
            self.name = "standard input"
            self._spool = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the source)
            shutil.copyfileobj(sys.stdin.buffer, self._spool)
        elif path is not None and not path.is_file():
            near = (
                nearest_names(path.name, [entry.name for entry in path.parent.iterdir()])
                if path.parent.is_dir()
                else []
            )
            raise DataError(
                f"{path}: no such file" + (f"; nearest: {', '.join(near)}" if near else "")
            )

    def __enter__(self) -> LineSource:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._spool is not None:
            self._spool.close()

    def __iter__(self) -> Iterator[str]:
        with self._open() as file:
            lines = file if isinstance(file, list) else bounded_lines(self.name, file)
            for number, raw in enumerate(lines, 1):
                try:
                    yield raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{self.name}:{number}: not UTF-8: byte 0x{raw[error.start]:02x} at byte"
                        f" {error.start + 1} of the line; convert the file, for example with: iconv"
                        " -f LATIN1 -t UTF-8"
                    ) from None

    @contextmanager
    def _open(self) -> Iterator[Any]:
        if self._text is not None:
            yield [line.encode() for line in self._text.removesuffix("\n").split("\n")]
        elif self._spool is not None:
            self._spool.seek(0)
            yield self._spool
        else:
            assert self._path is not None
            with self._path.open("rb") as file:
                zipped = file.read(2) == _GZIP_MAGIC
                file.seek(0)
                with gzip.GzipFile(fileobj=file) if zipped else nullcontext(file) as lines:
                    try:
                        yield lines
                    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                        raise DataError(
                            f"{self.name}: the gzip data is damaged or cut short ({error}); copy"
                            " the file again"
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
    from wellposed.cli._arguments import read_config

    config = Path(model) / "config.toml"
    trained = read_config(config).task_options if config.is_file() else {}
    kept: dict[str, Any] = {n: trained[n] for n in ("text_column", "header") if n in trained}
    options = TableOptions(**(kept | ({"text_column": text_column} if text_column else {})))
    found = read_texts(path, options)
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


class LineProgress:
    """A bar on a terminal and a plain line every ten seconds elsewhere, on standard error."""

    def __init__(self, total: int, *, what: str = "lines") -> None:
        self._total, self._what = total, what
        self._done = 0
        self._began = self._shown = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> LineProgress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            columns = (
                TextColumn(self._what),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task(self._what, total=self._total)
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int) -> None:
        """Add ``count`` finished lines."""
        self._done += count
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)
        elif now - self._shown >= SECONDS_BETWEEN_LINES:
            self._shown = now
            speed = self._done / (now - self._began)
            print(
                f"{self._done}/{self._total} {self._what}, {speed:.3g} per second",
                file=sys.stderr,
                flush=True,
            )
