"""Files that are either old or new, never half: write under a temporary name, sync, rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape
from hashlib import file_digest
from pathlib import Path
from typing import IO

from wellposed.errors import CheckpointError
from wellposed.regular_file import refuse_special

TEMPORARY = ".tmp-"
OLD = f"{TEMPORARY}old-"


def write_synced(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` and wait until it is on the disk. Every file of a checkpoint
    passes here."""
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
    with open_replacing(path) as file:
        file.write(data)


@contextmanager
def open_replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that becomes ``path`` in one step when the block ends without an error.

    Raises:
        OSError: it cannot be written, or ``path`` is a pipe or a device, which stays as it is.
    """
    refuse_special(path)
    temporary = _own_name(path)
    try:
        with temporary.open("xb") as file:  # x: never through a link that somebody put there
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def replace_files(folder: Path, *, last: str = ".json") -> Iterator[Path]:
    """Yield a temporary folder, each of whose files replaces that of its name in ``folder`` in one
    step at the end.

    Files with the suffix ``last`` come last: who finds one finds the others.
    """
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
    """Return a temporary name beside ``path`` that is this process's alone; what has it, or was
    left by dead processes, is removed."""
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
    except OSError:  # it is of another user
        pass
    return True


def _remove(path: Path) -> None:
    """Remove a file or a folder; `rmtree` alone waits for a pipe to be written to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``folder`` in one rename when the block ends without an
    error."""
    temporary = folder.with_name(f"{TEMPORARY}{folder.name}")
    _remove(temporary)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        sync_folder(temporary)
        old = folder.with_name(f"{OLD}{folder.name}")
        if folder.exists():
            # A rename cannot replace a folder that holds files; `remove_litter` undoes a kill
            # between the two renames.
            _remove(old)
            folder.rename(old)
        temporary.rename(folder)
        _remove(old)
    except BaseException:
        _remove(temporary)
        raise
    sync_folder(folder.parent)


@contextmanager
def full_disk_in_a_line(
    path: Path, what: str, kept: Callable[[], str] = lambda: "checkpoints are intact"
) -> Iterator[None]:
    """Turn what the system says of ``path`` into a `CheckpointError` that tells what to do next."""
    try:
        yield
    except OSError as error:
        problem = f"{path}: cannot write {what}: {error.strerror or error}; {kept()}"
        advice = "free space on the disk, then continue with --resume auto"
        raise CheckpointError(f"{problem}; {advice}") from error


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
        _remove(path)


def digest(path: Path) -> str:
    """Return the SHA-256 of the file ``path``."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
