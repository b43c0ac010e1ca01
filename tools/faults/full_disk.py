"""A disk that fills up: on a real small tmpfs, page by page, and at every operation that makes or
renames a file.

Right: the command ends with one line of its own, what was whole before is whole after, and once
there is room again the command goes on to exactly the end that it would have had.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.faults.children import fork, start_command, wait
from tools.faults.kills import Job, check_names, difference, shared_out, undisturbed
from tools.faults.outcome import Fault, Row
from tools.faults.toys import Toys, tree

PAGE = 4096
_MAKES = ("os.mkdir", "os.rename", "os.link", "os.symlink")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def run(toys: Toys, count: int, seed: int, only: str = "") -> Iterator[Row]:
    """Let ``count`` operations fail in all, spread over the commands and over both ways to fill a
    disk."""
    for job, wanted in shared_out(toys, count, only):
        draw = random.Random(f"{seed}/{job.name}")
        place = toys.root / "full"
        whole, _ = undisturbed(job, place / "whole", toys)
        one = Row("full disk", f"{job.name}: an operation fails", unit="operations")
        total = _operations(job, place / "counted", toys)
        for number in sorted(draw.sample(range(total), min(wanted // 2, total))):
            out = _fresh(place / "failing")
            _trial(job, out, one, whole, toys, f"operation {number} of {total}", fails_from=number)
        yield one
        if not can_mount():
            continue
        pages = Row("full disk", f"{job.name}: a small disk", unit="sizes")
        needed = (
            -(-sum(-(-len(data) // PAGE) for data in tree(place / "whole").values()) * 5 // 4) + 12
        )
        for size in sorted(draw.sample(range(1, needed), min(wanted - wanted // 2, needed - 1))):
            with _small_disk(_fresh(place / "small"), size) as out:
                _trial(job, out, pages, whole, toys, f"a disk of {size} pages", grow=True)
        yield pages


def can_mount() -> bool:
    """Return whether this user may mount a file system."""
    return sys.platform == "linux" and os.geteuid() == 0 and shutil.which("mount") is not None


@contextmanager
def _small_disk(folder: Path, pages: int) -> Iterator[Path]:
    _mount(folder, f"size={pages * PAGE}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _mount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _operations(job: Job, out: Path, toys: Toys) -> int:
    """Return how many operations of an undisturbed command could fail."""
    _fresh(out)
    counted = toys.root / "counted"
    log = toys.root / "full.log"

    def work() -> int:
        from wellposed.cli import main

        seen = _count(out, fails_from=None)
        status = main(job.words(out))
        counted.write_text(str(seen[0]))
        return status

    wait(fork(work, log), 300)
    return int(counted.read_text())


def _count(out: Path, fails_from: int | None) -> list[int]:
    """Count operations below ``out`` from now on; from one on, fail them as a full disk does."""
    seen = [0]
    inside = str(out)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            concerned = isinstance(path, (str, bytes)) and bool(flags & _WRITING)
        else:
            path, concerned = (arguments[0] if event in _MAKES else None), event in _MAKES
        if not concerned or not os.fsdecode(path).startswith(inside):
            return
        seen[0] += 1
        if fails_from is not None and seen[0] > fails_from:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fsdecode(path))

    sys.addaudithook(hook)
    return seen


def _trial(
    job: Job,
    out: Path,
    row: Row,
    whole: dict[str, Any],
    toys: Toys,
    what: str,
    *,
    fails_from: int | None = None,
    grow: bool = False,
) -> None:
    row.tried += 1
    case = f"{job.name}: {what}"
    log = toys.root / "full.log"
    log.unlink(missing_ok=True)
    inputs = {name: tree(toys.root / name) for name in job.inputs}

    def work() -> int:
        from wellposed.cli import main

        _count(out, fails_from)
        return main(job.words(out))

    status = wait(fork(work, log), 300)
    said = log.read_text(errors="replace")
    if status not in (0, 1, 2) or "Traceback" in said:
        row.add(Fault("foreign", case, f"exit status {status}: {said[-500:]}"))
    elif status != 0 and not any(
        word in said for word in ("space", "cannot be written", "cannot write", "cannot add")
    ):
        row.add(Fault("unclear", case, said[-500:]))
    if broken := check_names(out):
        row.add(Fault("wrong", case, f"not whole: {', '.join(broken)}"))
    if grow:
        subprocess.run(["mount", "-o", f"remount,size={1 << 28}", str(out)], check=True)
    log.unlink(missing_ok=True)
    status = wait(start_command(job.words(out), log), 300)
    if status != 0:
        row.add(
            Fault("lost", case, f"with room again: exit status {status}: {log.read_text()[-500:]}")
        )
    else:
        row.add(*difference(job, out, whole, case))
    if any(tree(toys.root / name) != before for name, before in inputs.items()):
        row.add(Fault("lost", case, "what it reads was changed"))
