"""Which process of a run this is, and how it is asked to stop. Free of torch."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
STOPPING = [sign for sign in signal.Signals if sign.name in ("SIGINT", "SIGTERM", "SIGHUP")]


class Cancelled(Exception):  # noqa: N818 (an event of the loop, not an error)
    """The run was asked to stop and can stop now."""


class StopRequest:
    """A context: the first signal of `STOPPING` sets `requested`, the second raises
    `KeyboardInterrupt`. With ``at_once`` the first does both. Outer contexts are notified too. An
    ignored SIGHUP, as under ``nohup``, stays ignored. Outside the main thread it has no effect."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.requested = False
        self._at_once = at_once
        self._outer: StopRequest | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            outer = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
            if isinstance(outer, StopRequest):
                self._outer = outer
                self.requested = outer.requested
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
            request.requested = True
            request = request._outer
        if self._at_once:
            raise KeyboardInterrupt(signal.Signals(number).name)


def run_until_stopped(work: Callable[[], int], again: str) -> int:
    """Run a command, return its exit status. On a signal, print how to continue and return 130."""
    status = INTERRUPTED
    with StopRequest(at_once=True) as stop, _finalisers_quiet():
        try:
            status = work()
        except KeyboardInterrupt:
            stop.requested = True
    if not stop.requested:
        return status
    if is_first():
        sys.stderr.write(f"interrupted; continue with: {again}\n")
    return INTERRUPTED


@contextmanager
def _finalisers_quiet() -> Iterator[None]:
    """Hide the traceback of an interruption inside a finaliser; the stop is still recorded."""
    previous = sys.unraisablehook
    sys.unraisablehook = lambda ignored: (
        None if isinstance(ignored.exc_value, KeyboardInterrupt) else previous(ignored)
    )
    try:
        yield
    finally:
        sys.unraisablehook = previous


def is_first() -> bool:
    """Whether this process writes files and prints results: the only one, or a launcher's first."""
    return os.environ.get("RANK", "0") == "0"


def is_one_of_several() -> bool:
    """Whether ``torchrun`` or ``accelerate launch`` started this process with others."""
    return "LOCAL_RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
