"""Work in processes forked from this one, which has imported everything: a start takes
milliseconds, not seconds.

This process itself never computes with torch, so that its children may.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tools.faults.outcome import Fault

HANG_SECONDS = 20.0
_IDLE = 0.002
"""Share of a processor below which a process waits."""
MEMORY_BYTES = 3 << 30
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Answer:
    """What a command said: exit status, both outputs, and the exception that it should have
    caught."""

    status: int
    out: str
    err: str
    foreign: str = ""


def import_everything() -> None:
    """Import what the commands would import one after the other."""
    import accelerate
    import datasets
    import jinja2
    import matplotlib.backends.backend_svg
    import torch
    import transformers.models.auto.modeling_auto

    import wellposed.certification
    import wellposed.compare.compare
    import wellposed.drawing
    import wellposed.models
    import wellposed.penalize
    import wellposed.recipes.reproduce
    import wellposed.report
    import wellposed.training

    del accelerate, datasets, jinja2, matplotlib, transformers, wellposed
    torch.set_num_threads(1)


def draw_plainly() -> None:
    """Let matplotlib write a digest of what a figure holds; to draw it takes a hundred times as
    long."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.text import Text
    from PIL import Image

    def savefig(self: Any, target: Any, *, format: str = "", **_: Any) -> None:  # noqa: A002 (matplotlib's word)
        said = [text.get_text() for text in self.findobj(Text)]
        drawn = [
            repr(np.asarray(line.get_xydata(), float).tolist()) for line in self.findobj(Line2D)
        ]
        digest = sha256("\n".join(said + drawn).encode("utf-8", "replace")).hexdigest()
        if format == "png":
            Image.new("RGB", (2, 2)).save(target, "png")
        elif hasattr(target, "write"):
            target.write(f"<svg><!-- {digest} --></svg>")
        else:
            Path(target).write_text(f"<svg><!-- {digest} -->{'x' * 5000}</svg>")

    Figure.savefig = savefig


def command(words: Sequence[str]) -> Answer:
    """Run one ``wellposed`` command in this process."""
    from wellposed.cli import main

    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    status, foreign = -1, ""
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = main([str(word) for word in words])
        except MemoryError as error:
            foreign = where_raised(error)
        except Exception as error:
            foreign = where_raised(error)
    out.flush()
    buffer = out.buffer
    assert isinstance(buffer, io.BytesIO)
    return Answer(status, buffer.getvalue().decode("utf-8", "replace"), err.getvalue(), foreign)


def where_raised(error: BaseException) -> str:
    """Return an exception and the innermost places it passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    places = " < ".join(
        f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-4:])
    )
    return f"{type(error).__name__}: {str(error)[:300]} ({places})"


def fork(work: Callable[[], int], log: Path) -> int:
    """Start ``work`` in a session of its own, its outputs to ``log``; return its process number."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        os.setsid()
        for number in SIGNALS:
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def start_command(words: Sequence[str], log: Path) -> int:
    """Start one ``wellposed`` command as a process of its own."""

    def work() -> int:
        from wellposed.cli import main

        return main([str(word) for word in words])

    return fork(work, log)


def wait(child: int, seconds: float = 60.0) -> int | None:
    """Return the exit code of a child (negative: the signal it died of); None where it hangs and
    was killed."""
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.005)


def session_members(session: int) -> list[int]:
    """Return the living processes of a session, zombies left out."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            state, _, _, members_session = (
                (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            )
            if int(members_session) == session and state != "Z":
                found.append(int(entry.name))
    return found


def orphans(session: int, seconds: float = 8.0) -> list[int]:
    """Return the processes of a session that do not end by themselves within some seconds, and end
    them."""
    deadline = time.monotonic() + seconds
    while (left := session_members(session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for member in left:
        with suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)
    return left


def each_in_children(
    count: int,
    work: Callable[[int], list[Fault]],
    name: Callable[[int], str],
    *,
    seconds: float = HANG_SECONDS,
    memory: int = MEMORY_BYTES,
    jobs: int = 1,
) -> Iterator[Fault]:
    """Call ``work`` with 0 .. count - 1 in ``jobs`` children.

    One that hangs or dies is a fault, and another goes on behind the number at which it did.
    """
    ends = [count * k // jobs for k in range(jobs + 1)]
    living = [
        _Child(range(*pair), work, seconds, memory) for pair in pairwise(ends) if pair[0] < pair[1]
    ]
    while living:
        ready, _, _ = select.select([child.pipe for child in living], [], [], 0.2)
        for child in list(living):
            if child.pipe in ready:
                yield from child.read()
            if (ended := child.ended()) is None:
                continue
            living.remove(child)
            kind, detail, rest = ended
            if kind:
                yield Fault(kind, name(rest.start - 1), detail)
            if rest:
                living.append(_Child(rest, work, seconds, memory))


class _Child:
    """A child that works through numbers and sends the faults it finds."""

    def __init__(
        self, numbers: range, work: Callable[[int], list[Fault]], seconds: float, memory: int
    ) -> None:
        self._numbers, self._seconds = numbers, seconds
        self._at = mmap.mmap(-1, 8)
        self._seen, self._rest, self._closed = numbers.start, b"", False
        self._at[:8] = numbers.start.to_bytes(8, "little")
        reader, writer = os.pipe()
        self._child = os.fork()
        if not self._child:
            os.close(reader)
            _work_through(numbers, work, self._at, writer, memory)
        os.close(writer)
        self.pipe = os.fdopen(reader, "rb", buffering=0)
        self._watch = _Watch(self._child, seconds)

    def read(self) -> Iterator[Fault]:
        """Yield the faults that have arrived."""
        data = self.pipe.read(1 << 16)
        self._closed = not data
        *lines, self._rest = (self._rest + (data or b"")).split(b"\n")
        for line in lines:
            yield Fault(**json.loads(line))

    def ended(self) -> tuple[str, str, range] | None:
        """Return the kind of fault that ended it, if any, a detail and the numbers left; None while
        it works."""
        now = int.from_bytes(self._at[:8], "little")
        if now != self._seen:
            self._seen = now
            self._watch.restart()
        hung = not self._closed and self._watch.is_over()
        if not (hung or self._closed):
            return None
        if hung:
            os.kill(self._child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        self.pipe.close()
        left = range(now + 1, self._numbers.stop)
        if hung:
            return "hung", f"no end within {self._seconds:g} s", left
        return (
            ("crashed", f"the process ended with exit status {status}", left)
            if status
            else ("", "", range(0))
        )


class _Watch:
    """Tells whether a child has computed for ``seconds``, or has waited for as long; a busy machine
    is neither."""

    def __init__(self, child: int, seconds: float) -> None:
        self._child, self._seconds = child, seconds
        self.restart()

    def restart(self) -> None:
        self._began, self._cpu = time.monotonic(), self._cpu_seconds()

    def is_over(self) -> bool:
        computed, passed = self._cpu_seconds() - self._cpu, time.monotonic() - self._began
        return computed > self._seconds or (passed > self._seconds and computed < _IDLE * passed)

    def _cpu_seconds(self) -> float:
        try:
            fields = Path(f"/proc/{self._child}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _work_through(
    numbers: range, work: Callable[[int], list[Fault]], at: mmap.mmap, writer: int, memory: int
) -> None:
    status = 1
    try:
        os.setsid()
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
        for number in numbers:
            at[:8] = number.to_bytes(8, "little")
            for fault in work(number):
                os.write(writer, json.dumps(vars(fault)).encode() + b"\n")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Make ``folder`` the current one for a while."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
