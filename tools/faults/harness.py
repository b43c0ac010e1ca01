"""What went wrong, and commands run in processes forked from one that has imported everything."""

from __future__ import annotations

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
from hashlib import sha256
from pathlib import Path
from typing import Any

KINDS = {
    "lost": "a result that was there, or could have been, is gone",
    "foreign": "an exception of another family, or a traceback",
    "wrong": "another result, or half a file taken for whole, without a word",
    "unclear": "an error that does not name the file, or is longer than anybody reads",
    "hung": "no end within the time allowed",
    "crashed": "the process died, or took more memory than it was given",
    "orphan": "a process that outlived its command",
}
LONGEST_MESSAGE = 20_000
MEMORY_BYTES = 3 << 30


@dataclass(frozen=True)
class Fault:
    """One thing that went wrong."""

    kind: str
    case: str
    detail: str


@dataclass
class Row:
    """One line of the table: what was tried, how often, and the faults."""

    family: str
    what: str
    unit: str = "commands"
    tried: int = 0
    faults: list[Fault] = field(default_factory=list)

    def add(self, kind: str, case: str, detail: str) -> None:
        """Note a fault and say so at once: what follows may take an hour."""
        self.faults.append(Fault(kind, case, detail))
        sys.stderr.write(f"  {kind}: {case}: {' '.join(detail.split())[:400]}\n")
        sys.stderr.flush()

    def meet(self, words: Sequence[str], case: str, log: Path) -> None:
        """Run one command and note what any command may not do."""
        self.tried += 1
        answer = run(words, log)
        if kind := answer.fault():
            self.add(kind, case, answer.said[-600:])


@dataclass(frozen=True)
class Answer:
    """What a command ended with; status None: it hung; below 0: the signal that it died of."""

    status: int | None
    said: str

    def fault(self) -> str | None:
        """Return the kind of fault that any command's answer can be, by itself."""
        if self.status is None:
            return "hung"
        if self.status not in (0, 1, 2) or "MemoryError" in self.said:
            return "crashed"
        if "Traceback (most recent call last)" in self.said:
            return "foreign"
        unreadable = "\x1b" in self.said or len(self.said) > LONGEST_MESSAGE
        return "unclear" if self.status and unreadable else None


def import_everything() -> None:
    """Import what the commands would; figures are written as digests, not drawn."""
    import accelerate
    import datasets
    import jinja2
    import matplotlib.backends.backend_svg
    import torch
    import transformers.models.auto.modeling_auto
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from PIL import Image

    import wellposed.certification
    import wellposed.models
    import wellposed.report
    import wellposed.training

    del accelerate, datasets, jinja2, matplotlib, transformers, wellposed
    torch.set_num_threads(1)

    def savefig(self: Any, target: Any, *, format: str = "", **_: Any) -> None:  # noqa: A002
        drawn = [repr(line.get_xydata().tolist()) for line in self.findobj(Line2D)]
        picture = f"<svg><!-- {sha256(''.join(drawn).encode()).hexdigest()} --></svg>"
        if format == "png":
            Image.new("RGB", (2, 2)).save(target, "png")
        elif hasattr(target, "write"):
            target.write(picture)
        else:
            Path(target).write_text(picture)

    Figure.savefig = savefig


def start(words: Sequence[str], log: Path, memory: int | None = None) -> int:
    """Start one ``wellposed`` command in a session of its own; return its process number."""
    from wellposed.cli import main

    return fork(lambda: main([str(word) for word in words]), log, memory)


def fork(work: Callable[[], int], log: Path, memory: int | None = None) -> int:
    """Start ``work`` in a child, its outputs to ``log``; return its process number."""
    log.unlink(missing_ok=True)
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
    """Return the exit code of a child; None where it hangs and was killed."""
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
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError, IndexError):
                state, _, _, own = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(own) == session and state != "Z":
                    found.append(int(entry.name))
        return found

    deadline = time.monotonic() + seconds
    while (left := members()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for member in left:
        with suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)
    return len(left)
