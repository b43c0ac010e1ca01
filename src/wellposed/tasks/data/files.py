"""Text files: plain or gzip, strict UTF-8, with the sha256 that identifies them."""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from wellposed.errors import DataError, nearest_names

BOM = "\ufeff"
_GZIP_MAGIC = b"\x1f\x8b"
_BLOCK = 1 << 20
LONGEST_LINE = 1 << 26
BOMB_BYTES, BOMB_RATIO = 1 << 28, 100
"""Packed data may unpack to so many bytes, or to so many times its own size where that is more."""
# Line ends, tabs, form feeds, ESC and everything from the space on: what UTF-8 and LATIN1 texts are
# made of.
_TEXT_BYTES = bytes([*range(8, 14), 27, *range(32, 256)])


@dataclass(frozen=True)
class TextFile:
    """A decoded file and what identifies it."""

    path: Path
    text: str
    sha256: str
    """Of the bytes as stored, before gunzip."""
    stored_bytes: int
    byte_order_mark: bool
    """Whether a UTF-8 byte order mark was taken off the start."""

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield numbered lines; only a line feed, with or without a carriage return before it, ends
        a line."""
        for number, line in enumerate(self.text.removesuffix("\n").split("\n"), start=1):
            yield number, line.removesuffix("\r")

    def description(self) -> dict[str, Any]:
        """Return path, sha256 and size; the byte order mark only where there was one."""
        described: dict[str, Any] = {
            "path": str(self.path),
            "sha256": self.sha256,
            "bytes": self.stored_bytes,
        }
        if self.byte_order_mark:
            described["byte_order_mark_removed"] = True
        return described


def read_text(path: Path) -> TextFile:
    """Read a UTF-8 text file, plain or gzip; line ends stay as they are; what cannot be read is a
    `DataError`."""
    stored = _read_bytes(path)
    content = _gunzip(path, stored)
    if not content:
        raise DataError(f"{path}: the file is empty; give a file that holds text")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, content, error) from None
    marked = text.startswith(BOM)
    if marked:
        text = text[1:]
    if not text.strip():
        raise DataError(f"{path}: the file holds white space only; give a file that holds text")
    return TextFile(path, text, hashlib.sha256(stored).hexdigest(), len(stored), marked)


def _read_bytes(path: Path) -> bytes:
    if path.is_dir():
        raise DataError(f"{path}: is a folder, expected a file")
    if path.exists() and not path.is_file():
        raise DataError(
            f"{path}: is a pipe or a device, expected a file, as it is read more than once"
        )
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise missing_file(path) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def _gunzip(path: Path, stored: bytes) -> bytes:
    if not stored.startswith(_GZIP_MAGIC):
        if path.suffix == ".gz" and stored:
            raise DataError(
                f"{path}: is named .gz but is not gzip; take .gz off its name if it is plain text"
            )
        return stored
    content = io.BytesIO()
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(stored)) as file:
            while block := file.read(_BLOCK):
                content.write(block)
                refuse_bomb(path, len(stored), content.tell())
        return content.getvalue()
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(
            f"{path}: the gzip data is damaged or cut short ({error}); copy the file again"
        ) from None


def bounded_lines(name: object, file: IO[bytes] | io.BufferedIOBase) -> Iterator[bytes]:
    """Yield the lines of a file; one of more than `LONGEST_LINE` bytes, as zeros without end are,
    is a `DataError`."""
    for number, line in enumerate(iter(partial(file.readline, LONGEST_LINE + 1), b""), start=1):
        if len(line) > LONGEST_LINE:
            raise DataError(
                f"{name}:{number}: a line of more than {LONGEST_LINE:,} bytes; is it a file of"
                " lines of text?"
            )
        yield line


def refuse_bomb(path: Path, stored: int, unpacked: int) -> None:
    """Refuse packed data that grows beyond all measure, before it takes all memory."""
    if unpacked > max(BOMB_BYTES, BOMB_RATIO * stored):
        raise DataError(
            f"{path}: its {stored:,} bytes unpack to more than {BOMB_RATIO} times as many,"
            f" {unpacked:,} so far, which no text or image does; unpack it yourself if you trust it"
        )


def _not_utf8(path: Path, content: bytes, error: UnicodeDecodeError) -> DataError:
    line = content.count(b"\n", 0, error.start) + 1
    column = error.start - content.rfind(b"\n", 0, error.start)
    hint = "convert it with, for example: iconv -f LATIN1 -t UTF-8"
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        hint = "the file looks like UTF-16; convert it with: iconv -f UTF-16 -t UTF-8"
    elif content.translate(None, _TEXT_BYTES):
        hint = "the file holds control bytes, which no text has; give a text file"
    return DataError(
        f"{path}:{line}: not UTF-8: byte 0x{content[error.start]:02x} at byte {column} of the line,"
        f" byte offset {error.start} of the file ({error.reason}); {hint}"
    )


def missing_file(path: Path) -> DataError:
    """Build the error for a path that does not exist, with the nearest names in the deepest folder
    that does."""
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    wanted = path.relative_to(folder).parts[0] if path != folder else path.name
    near = (
        nearest_names(wanted, sorted(entry.name for entry in folder.iterdir()))
        if folder.is_dir()
        else []
    )
    hint = f"nearest in {folder}: {', '.join(near)}" if near else f"{folder} holds nothing"
    return DataError(f"{path}: no such file or folder; {hint}")


def describe_file(path: Path) -> dict[str, Any]:
    """Return path, sha256 and size of a file."""
    stored = path.read_bytes()
    return {"path": str(path), "sha256": hashlib.sha256(stored).hexdigest(), "bytes": len(stored)}
