"""Reads files of folders that came from elsewhere, and refuses a folder, a pipe or a
device in their place."""

from __future__ import annotations

import errno
from pathlib import Path


def read_bytes(path: Path) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: it cannot be read, or is a folder, a pipe or a device, from which nothing or no end might
        ever come.

    >>> read_bytes(Path("/dev/zero"))
    Traceback (most recent call last):
    ...
    OSError: [Errno 22] is a pipe or a device, expected a file: '/dev/zero'
    """
    refuse_special(path)
    return path.read_bytes()


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 file, as `read_bytes`; line ends stay as they are."""
    return read_bytes(path).decode("utf-8")


def refuse_special(path: Path) -> None:
    """Refuse a folder, a pipe or a device with an `OSError`; what does not exist passes."""
    if path.exists() and not path.is_file():
        kind = "folder" if path.is_dir() else "pipe or a device"
        raise OSError(errno.EINVAL, f"is a {kind}, expected a file", str(path))
