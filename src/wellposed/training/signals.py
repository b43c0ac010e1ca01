"""SIGINT and SIGTERM ask the run to stop; a second one ends it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Cancelled(Exception):  # noqa: N818 (an event of the loop, not an error)
    """The run was asked to stop and has come to a place where it can."""


class StopRequest:
    """A context in which the first SIGINT or SIGTERM sets `requested` and the second raises `KeyboardInterrupt`.

    Outside the main thread Python delivers no signals, so there the context changes nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in STOPPING}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.requested:
            raise KeyboardInterrupt(f"second signal ({signal.Signals(number).name})")
        self.requested = True
