"""Read files of untrusted folders; refuse folders, pipes and devices."""

from __future__ import annotations

import errno
from pathlib import Path


def read_bytes(path: Path) -> bytes:
    """Return the content of a file; `OSError` for folders, pipes and devices."""
    refuse_special(path)
    return path.read_bytes()


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 file, as `read_bytes`; line ends are not converted."""
    return read_bytes(path).decode("utf-8")


def refuse_special(path: Path) -> None:
    """Raise `OSError` for a folder, pipe or device; a missing path passes."""
    if path.exists() and not path.is_file():
        kind = "folder" if path.is_dir() else "pipe or a device"
        raise OSError(errno.EINVAL, f"is a {kind}, expected a file", str(path))
