"""Which of the processes of one run this is, and how it is asked to stop; free of torch."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
STOPPING = [each for each in signal.Signals if each.name in ("SIGINT", "SIGTERM", "SIGHUP")]


class Cancelled(Exception):  # noqa: N818 (an event of the loop, not an error)
    """The run was asked to stop and has come to a place where it can."""


class StopRequest:
    """A context in which the first signal of `STOPPING` sets `requested` and the second raises
    `KeyboardInterrupt`; with ``at_once`` the first does both.

    Contexts around it hear of it too. A SIGHUP that is ignored, as under ``nohup``, stays
    ignored. Outside the main thread Python delivers no signals, so there the context changes
    nothing.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self.requested, self._at_once = False, at_once
        self._outer: StopRequest | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            outer = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
            if isinstance(outer, StopRequest):
                self._outer, self.requested = outer, outer.requested
            asked = [number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN]
            self._previous = {number: signal.signal(number, self._handle) for number in asked}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.requested:
            raise KeyboardInterrupt(f"second signal ({signal.Signals(number).name})")
        request: StopRequest | None = self
        while request is not None:
            request.requested, request = True, request._outer
        if self._at_once:
            raise KeyboardInterrupt(signal.Signals(number).name)


def run_until_stopped(work: Callable[[], int], again: str) -> int:
    """Do the work of a whole command and return its exit status; if a signal asks it to stop, at
    whatever moment, say how to go on and return 130."""
    status = INTERRUPTED
    with StopRequest(at_once=True) as stop, _finalisers_quiet():
        try:
            status = work()
        except KeyboardInterrupt:
            stop.requested = True
    if not stop.requested:
        return status
    if is_first():
        sys.stderr.write(f"interrupted; go on with: {again}\n")
    return INTERRUPTED


@contextmanager
def _finalisers_quiet() -> Iterator[None]:
    """Show no traceback of an interruption that met a finaliser, in which Python ignores it: the
    request is noted, and the next run ends by it."""
    shown = sys.unraisablehook
    sys.unraisablehook = lambda ignored: (
        None if isinstance(ignored.exc_value, KeyboardInterrupt) else shown(ignored)
    )
    try:
        yield
    finally:
        sys.unraisablehook = shown


def is_first() -> bool:
    """Whether this process writes files and prints results: the only one, or the first that a
    launcher started."""
    return os.environ.get("RANK", "0") == "0"


def is_one_of_several() -> bool:
    """Whether ``torchrun`` or ``accelerate launch`` started this process beside others."""
    return "LOCAL_RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
