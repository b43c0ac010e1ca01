"""What went wrong, and commands run in processes forked from one that has imported everything."""

from __future__ import annotations

import importlib
import mmap
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KINDS = ("lost", "foreign", "wrong", "unclear", "hung", "crashed", "orphan")
"""Columns of the page, which says what each is."""
LONGEST_MESSAGE = 20_000
MEMORY_BYTES = 3 << 30


@dataclass
class Row:
    """One line of the table: what was tried, how often, and the faults."""

    what: str
    unit: str = "commands"
    tried: int = 0
    faults: list[dict[str, str]] = field(default_factory=list)

    def add(self, kind: str, case: str, detail: str) -> None:
        """Note a fault and say so at once: what follows may take an hour."""
        self.faults.append({"kind": kind, "case": case, "detail": detail})
        sys.stderr.write(f"  {kind}: {case}: {' '.join(detail.split())[:400]}\n")

    def meet(self, words: Sequence[str], case: str, log: Path) -> None:
        """Run one command and note what any command may not do."""
        self.tried += 1
        answer = run(words, log)
        if kind := answer.fault():
            self.add(kind, case, answer.output[-600:])


@dataclass(frozen=True)
class Answer:
    """The end of a command; status None: it hung; below 0: the signal that ended it."""

    status: int | None
    output: str

    def fault(self) -> str | None:
        """Return the kind of fault that any command's answer can be, by itself."""
        if self.status is None:
            return "hung"
        if self.status not in (0, 1, 2) or "MemoryError" in self.output:
            return "crashed"
        if "Traceback (most recent call last)" in self.output:
            return "foreign"
        unreadable = "\x1b" in self.output or len(self.output) > LONGEST_MESSAGE
        return "unclear" if self.status and unreadable else None


def import_everything() -> None:
    """Import what the commands would; figures are not drawn."""
    for name in (
        *("accelerate", "datasets", "jinja2", "matplotlib.backends.backend_svg", "torch"),
        *("transformers.models.auto.modeling_auto", "wellposed.certification", "wellposed.models"),
        *("wellposed_lab.report", "wellposed_lab.training"),
    ):
        importlib.import_module(name)
    from matplotlib.figure import Figure

    def save(out: Any) -> None:
        Path(out).write_text("<svg />") if isinstance(out, Path) else out.write("<svg />")

    Figure.savefig = lambda _, out, **__: save(out)


def start(words: Sequence[str], log: Path, memory: int | None = None) -> int:
    """Start one ``wellposed`` command in a session of its own; return its process number."""
    from wellposed_lab.cli.main import main

    return fork(lambda: main([str(word) for word in words]), log, memory)


def fork(work: Callable[[], int], log: Path, memory: int | None = None) -> int:
    """Start ``work`` in a child, its outputs to ``log``; return its process number."""
    log.write_bytes(b"")  # here, so that it is there however early the child is killed
    sys.stdout.flush()
    if child := os.fork():
        return child
    status = 70
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            by_python = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if by_python else signal.SIG_DFL)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if memory:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
            resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def wait(child: int, seconds: float) -> int | None:
    """Return the exit code of a child; None if it hung and was killed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def run(words: Sequence[str], log: Path, seconds: float = 60.0) -> Answer:
    """Run one command to its end, within bounds of time and memory."""
    status = wait(start(words, log, MEMORY_BYTES), seconds)
    return Answer(status, log.read_text(encoding="utf-8", errors="replace"))


def orphans(session: int, seconds: float = 8.0) -> int:
    """Return how many processes of a session do not end by themselves, and end them."""

    def members() -> list[int]:
        running = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError, IndexError):
                state, _, _, owner = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(owner) == session and state != "Z":
                    running.append(int(entry.name))
        return running

    deadline = time.monotonic() + seconds
    while (left := members()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for member in left:
        with suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)
    return len(left)
