"""Atomic writes; and ``manifest.json``, sizes and SHA-256 of files, to find damage."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from glob import escape
from hashlib import file_digest, sha256
from pathlib import Path
from typing import IO, Any

from wellposed.errors import CheckpointError
from wellposed.finite_json import from_json, to_json
from wellposed.regular_file import refuse_special

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


def digest(path: Path) -> str:
    """Return the SHA-256 of the file ``path``."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


Names = Collection[str]
MANIFEST, FORMAT = "manifest.json", 1
MEASURED = ("measure-initial.json", "measure-final.json")
RECORDS = ("config.toml", "env.json", "metrics.jsonl", "result.json", *MEASURED)
"""Files of a run folder that its manifest lists, once the run has ended."""


def describe(files: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    """Return size and digest of each file, from its bytes."""
    digests = {name: sha256(data).hexdigest() for name, data in sorted(files.items())}
    return {name: {"bytes": len(files[name]), "sha256": sha} for name, sha in digests.items()}


def write_manifest(
    folder: Path, names: Iterable[str], *, coming: Mapping[str, bytes] | None = None
) -> None:
    """Write the manifest of the existing ``names`` and of files still to come, atomically."""
    files = [path for path in (folder / name for name in sorted(names)) if path.is_file()]
    entries = {path.name: {"bytes": path.stat().st_size, "sha256": digest(path)} for path in files}
    record = {"format": FORMAT, "files": entries | describe(coming or {})}
    replace_file(folder / MANIFEST, to_json(record, indent=2))


def verify(folder: Path, advice: str, *, needed: Names = (), only: Names | None = None) -> None:
    """Check each file in the manifest of ``folder``, or those of ``only``. Missing, cut or altered
    files, no ``needed`` name, or a bad manifest are a `CheckpointError` with ``advice``."""
    path = folder / MANIFEST
    try:
        manifest = from_json(path.read_bytes())
        files = manifest["files"].items()
        entries = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files}
        known = manifest["format"] == FORMAT and set(needed) <= set(entries)
        if not known or any(os.sep in name for name in entries):
            raise ValueError(f"not a manifest of format {FORMAT}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{path}: unreadable manifest ({type(error).__name__}: {error})"
        raise CheckpointError(f"{problem}; {advice}") from error
    wanted = entries if only is None else entries.keys() & set(only)
    results = (_problem(folder / name, *entries[name]) for name in sorted(wanted))
    if problems := list(filter(None, results)):
        raise CheckpointError(f"{'; '.join(problems)}; {advice}")


def verify_run_file(path: Path) -> None:
    """Check a file of a run by its manifest (none before the end); `CheckpointError` if damaged."""
    if (path.parent / MANIFEST).is_file():
        advice = f"restore it; if you changed it yourself, remove {path.parent / MANIFEST}"
        verify(path.parent, advice, only=(path.name,))


def verify_final(folder: Path, *, weights: bool = True) -> None:
    """Check a saved model (``final/`` of a run, or a copy) against its manifest; without one
    (version 0.1) it passes.

    Args:
        folder: the saved model.
        weights: also read the weights, nearly all of the bytes.

    Raises:
        CheckpointError: missing, cut or altered files, with the expected and actual digests.

    Cost: reading the files, about a second for a gigabyte. It does not tell who wrote the files.

    >>> verify_final(Path("no-such-folder"))
    """
    if not (folder / MANIFEST).is_file():
        return
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    small = None if weights else [name for name in names if not name.endswith(".safetensors")]
    verify(
        folder,
        "the saved model cannot be trusted: copy the folder again from an intact copy, or"
        f" remove {folder} and finish the run again with --resume auto",
        only=small,
    )


def _problem(path: Path, size: int, expected: str) -> str | None:
    if not path.is_file():
        return f"{path}: missing"
    if (size_now := path.stat().st_size) != size:
        change = "cut short" if size_now < size else "added to"
        return f"{path}: {size_now} bytes, expected {size} ({change})"
    actual = digest(path)
    is_right = actual == expected
    return None if is_right else f"{path}: SHA-256 is {actual}, expected {expected} (altered)"
