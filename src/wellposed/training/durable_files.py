"""Files that are either old or new, never half: write under a temporary name, sync, rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

TEMPORARY = ".tmp-"
OLD = f"{TEMPORARY}old-"


def write_synced(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` and wait until it is on the disk. Every file of a checkpoint passes here."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Wait until a file that another library wrote is on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in ``folder`` are on the disk, where the platform can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows cannot open a folder
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(path: Path, data: bytes) -> None:
    """Give ``path`` the content ``data`` in one step; a crash leaves the old content."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    try:
        write_synced(temporary, data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``folder`` in one rename when the block ends without an error."""
    temporary = folder.with_name(f"{TEMPORARY}{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        sync_folder(temporary)
        if folder.exists():
            # A rename cannot replace a folder that holds files; `remove_litter` undoes a kill between the two renames.
            old = folder.with_name(f"{OLD}{folder.name}")
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
            temporary.rename(folder)
            shutil.rmtree(old)
        else:
            temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(folder.parent)


def is_litter(path: Path) -> bool:
    """Return whether ``path`` is a temporary name of this module."""
    return path.name.startswith(TEMPORARY)


def remove_litter(folder: Path) -> None:
    """Undo what a killed run left under temporary names in ``folder``."""
    for old in folder.glob(f"{OLD}*"):
        target = folder / old.name.removeprefix(OLD)
        if not target.exists():
            old.rename(target)
    for path in folder.glob(f"{TEMPORARY}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def digest(path: Path) -> str:
    """Return the SHA-256 of the file ``path``."""
    hasher = sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            hasher.update(block)
    return hasher.hexdigest()
