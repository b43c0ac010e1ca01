"""Atomic writes: a crash leaves the old content or the new."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import IO

from wellposed.safe_read import refuse_special

TEMPORARY = ".tmp-"
OLD = f"{TEMPORARY}old-"


def write_synced(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` and wait until it is on the disk, as for every checkpoint file."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Wait until a file that another library wrote is on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in ``folder`` are on the disk, if the platform can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows cannot open a folder
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(path: Path, data: bytes) -> None:
    """Replace the content of ``path`` by ``data`` atomically; a crash leaves the old content."""
    with open_replacing(path) as file:
        file.write(data)


@contextmanager
def open_replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that becomes ``path`` in one step if the block ends without an error. A failed
    write is an `OSError` that names ``path``; a folder, a pipe or a device there is left alone."""
    refuse_special(path)
    temporary = _own_name(path)
    try:
        with temporary.open("xb") as file:  # x: never follow a link
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise
    sync_folder(path.parent)


@contextmanager
def replace_files(folder: Path, *, last: str = ".json") -> Iterator[Path]:
    """Yield a temporary folder, each of whose files then replaces the one in ``folder`` in one
    step. Files ending in ``last`` are moved last, so their presence implies the others."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = _own_name(folder / "files")
    temporary.mkdir()
    try:
        yield temporary
        paths = sorted(temporary.iterdir(), key=lambda path: (path.suffix == last, path.name))
        for path in paths:
            sync_file(path)
        for path in paths:
            path.replace(folder / path.name)
        sync_folder(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _own_name(path: Path) -> Path:
    """Return a temporary name beside ``path`` for this process; remove those of dead processes."""
    for left in path.parent.glob(f"{TEMPORARY}*-{escape(path.name)}"):
        number = left.name.removeprefix(TEMPORARY).removesuffix(f"-{path.name}")
        if number.isdigit() and (int(number) == os.getpid() or not _lives(int(number))):
            _remove(left)
    return path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # the process of another user
        pass
    return True


def _remove(path: Path) -> None:
    """Remove a file or a folder; `rmtree` alone would block on a pipe."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``folder`` in one rename if no error occurs."""
    temporary = folder.with_name(f"{TEMPORARY}{folder.name}")
    _remove(temporary)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        sync_folder(temporary)
        old = folder.with_name(f"{OLD}{folder.name}")
        if folder.exists():
            # A rename cannot replace a full folder. `remove_litter` repairs a kill between the two.
            _remove(old)
            folder.rename(old)
        temporary.rename(folder)
        _remove(old)
    except BaseException:
        _remove(temporary)
        raise
    sync_folder(folder.parent)


def is_litter(path: Path) -> bool:
    """Return whether ``path`` is a temporary name of this module."""
    return path.name.startswith(TEMPORARY)


def remove_litter(folder: Path) -> None:
    """Remove what a killed run left under temporary names in ``folder``."""
    for old in folder.glob(f"{OLD}*"):
        target = folder / old.name.removeprefix(OLD)
        if not target.exists():
            old.rename(target)
    for path in folder.glob(f"{TEMPORARY}*"):
        _remove(path)
