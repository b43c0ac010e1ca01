"""SIGINT, SIGTERM and SIGHUP (a closed terminal) ask the run to stop; a second one ends it at
once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

STOPPING = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


class Cancelled(Exception):  # noqa: N818 (an event of the loop, not an error)
    """The run was asked to stop and has come to a place where it can."""


class StopRequest:
    """A context in which the first signal of `STOPPING` sets `requested` and the second raises
    `KeyboardInterrupt`.

    Inside another such context both hear of it. A SIGHUP that is ignored, as under ``nohup``, stays
    ignored. Outside the main thread Python delivers no signals, so there the context changes
    nothing.
    """

    def __init__(self) -> None:
        self.requested = False
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.requested:
            raise KeyboardInterrupt(f"second signal ({signal.Signals(number).name})")
        self.requested = True
        if self._outer is not None:
            self._outer.requested = True
