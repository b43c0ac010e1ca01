"""One writer for each run folder: a lock that ends with its process, however that ends."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from wellposed.errors import ConfigError

NAME = "run.lock"
_held: set[int] = set()


def _leave_to_parent() -> None:
    while _held:
        os.close(_held.pop())


if hasattr(
    os, "register_at_fork"
):  # else a worker that outlives its killed parent would hold the lock for it
    os.register_at_fork(after_in_child=_leave_to_parent)


@contextmanager
def only_writer(out: Path, *, enabled: bool = True) -> Iterator[None]:
    """Hold the lock of the folder ``out``, which is made where it is missing.

    The system lets go of the lock with its process, so the file that a killed one leaves is taken
    over. Where the system or its file system has no such locks (Windows, some network disks)
    nothing is held.

    Raises:
        ConfigError: another process has it; the message has its number and host.
    """
    if not enabled:
        yield
        return
    out.mkdir(parents=True, exist_ok=True)
    path = out / NAME
    handle = _locked(path)
    _held.add(handle)
    try:
        os.truncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        with suppress(OSError):  # a folder that became unwritable, or is gone
            path.unlink()
        _held.discard(handle)
        os.close(handle)


def _locked(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if not _try_lock(handle):
            owner = os.read(handle, 200).decode(errors="replace").strip()
            os.close(handle)
            raise ConfigError(
                f"{path.parent}: {owner or 'another process'} is writing this run (it holds"
                f" {path.name}); wait for it, stop it, or name another --out"
            )
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        os.close(handle)  # the last owner removed the file between the two calls


def _try_lock(handle: int) -> bool:
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
