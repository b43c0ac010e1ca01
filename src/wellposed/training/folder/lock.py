"""One writer for each run folder: a lock that ends with its process, however that ends."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from wellposed.errors import ConfigError

NAME = "run.lock"
_BEGIN = b"process "
_NOT_A_FILE = (errno.ELOOP, errno.EISDIR, errno.EEXIST)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@contextmanager
def only_writer(out: Path, *, enabled: bool = True) -> Iterator[None]:
    """Hold the lock of the folder ``out``, which is made where it is missing.

    The system lets go of the lock with its process, so the file that a killed one leaves is taken
    over. On a file system without locks nothing is held. No file but a lock of ours is written to.

    Raises:
        ConfigError: another process has it, by number and host; or its name is a link, or taken.
    """
    if not enabled:
        yield
        return
    from filelock import FileLock, Timeout

    out.mkdir(parents=True, exist_ok=True)
    path = out / NAME
    lock = FileLock(path, timeout=0, fallback_to_soft=False, on_acquired=_sign)
    try:
        lock.acquire()
    except Timeout:
        owner = ""
        with suppress(OSError):  # it is let go of at this moment
            owner = path.read_text(encoding="utf-8", errors="replace").strip()
        raise ConfigError(
            f"{out}: {owner or 'another process'} is writing this run (it holds {NAME}); wait for"
            " it, stop it, or name another --out"
        ) from None
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            raise ConfigError(
                f"{path}: a link, or a file of something else, where the lock of the run goes; it is"
                " left as it is: rename it, or name another --out"
            ) from error
        if error.errno not in _NO_LOCKS:
            raise
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):  # a folder that became unwritable, or is gone
                path.unlink()
            lock.release()


def _sign(handle: int) -> None:
    """Write whose the lock is, into a file that holds nothing but that."""
    found = os.fstat(handle)
    is_plain = stat.S_ISREG(found.st_mode) and found.st_nlink <= 1
    if not is_plain or (found.st_size and os.read(handle, len(_BEGIN)) != _BEGIN):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    os.truncate(handle, 0)
    os.lseek(handle, 0, os.SEEK_SET)
    os.write(handle, _BEGIN + f"{os.getpid()} on {socket.gethostname()}\n".encode())
