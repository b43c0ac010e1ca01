"""Edits that an exception or Ctrl-C leaves whole or not done, and never half done."""

from __future__ import annotations

import _thread
import importlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType, TracebackType
from typing import Any

_MISSING = object()
_SIGNALS = sorted(signal.valid_signals())
# `signal.getsignal` without its enum, which takes 40 us for all signals, many times in each verb.
_handler_of: Callable[[int], Any] = importlib.import_module("_signal").getsignal
_Handler = Callable[[int, FrameType | None], Any]


class uninterrupted:  # noqa: N801 (a context manager that is read as a verb)
    """Delay signals that Python handles, such as Ctrl-C, until the block ends.

    Handlers run in the main thread alone, so in another thread nothing is delayed. A block of the
    main thread may end in another, as one of a generator that is collected there: signals that
    arrived reach their handlers at once, and so do later ones. Keep the block short: training cannot
    be stopped inside it.

    >>> with uninterrupted():
    ...     edited = True
    """

    _depth = 0
    _handlers: dict[int, _Handler] = {}  # noqa: RUF012 (one table of handlers in a process)
    _arrived: list[tuple[int, FrameType | None]] = []  # noqa: RUF012
    _is_left = False
    """Whether the last block ended in a thread that cannot restore the handlers."""

    def __enter__(self) -> None:
        self._is_active = threading.current_thread() is threading.main_thread()
        if not self._is_active:
            return
        if not uninterrupted._depth:
            try:
                self._delay()
            except BaseException:
                self._restore()
                raise
        uninterrupted._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._is_active:
            return
        uninterrupted._depth -= 1
        if uninterrupted._depth:
            return

        if threading.current_thread() is not threading.main_thread():
            uninterrupted._is_left = True
            while self._arrived:
                number: Any = self._arrived.pop(0)[0]  # real-time signals are not in the enum
                _thread.interrupt_main(number)
            return

        handlers = dict(self._handlers)
        try:
            self._restore()
        finally:  # a signal that arrives between two handlers
            self._restore()

        while self._arrived:
            number, frame = self._arrived.pop(0)
            handlers[number](number, frame)

    @staticmethod
    def _delay() -> None:
        uninterrupted._is_left = False
        for number in _SIGNALS:
            handler = _handler_of(number)
            # Ours is still there if the last block ended in another thread.
            if callable(handler) and handler is not _note:
                uninterrupted._handlers[number] = handler
                signal.signal(number, _note)

    @staticmethod
    def _restore() -> None:
        for number, handler in [*uninterrupted._handlers.items()]:
            signal.signal(number, handler)
            uninterrupted._handlers.pop(number, None)


def _note(number: int, frame: FrameType | None) -> None:
    if uninterrupted._is_left:
        uninterrupted._handlers[number](number, frame)
    else:
        uninterrupted._arrived.append((number, frame))


class Undo:
    """Calls that undo edits, the last first. A call must be safe to repeat."""

    def __init__(self, *calls: Callable[[], Any]) -> None:
        self._calls = [*calls]

    def later(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Note a call; note it before the edit, so that nothing comes between them."""
        self._calls.append(partial(call, *arguments))

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute, also a submodule, and note how to restore it."""
        self.later(_put_back, owner, name, getattr(owner, name, _MISSING))
        setattr(owner, name, value)

    def hook(self, register: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Register a hook, and note its removal; no signal comes between the two."""
        with uninterrupted():
            self.later(register(*arguments, **options).remove)

    def forget(self) -> None:
        """Keep the edits."""
        self._calls = []

    def run(self) -> None:
        """Undo everything. A call that raises does not keep the others from running; it is tried
        twice, and its first error is raised."""
        failed: list[BaseException] = []
        for _ in range(2):
            failing: list[Callable[[], Any]] = []
            while self._calls:
                try:
                    self._calls[-1]()
                except BaseException as error:
                    failed.append(error)
                    failing.insert(0, self._calls[-1])
                self._calls.pop()
            self._calls = failing
        if failed:
            raise failed[0]


def _put_back(owner: Any, name: str, value: Any) -> None:
    if value is not _MISSING:
        setattr(owner, name, value)
    elif hasattr(owner, name):
        delattr(owner, name)


def run_all(*calls: Callable[[], Any]) -> None:
    """Run calls that are safe to repeat, also after one that raises; signals wait until the end."""
    with uninterrupted():
        undo = Undo(*reversed(calls))
        try:
            undo.run()
        finally:
            undo.run()


@contextmanager
def undoing() -> Iterator[Undo]:
    """Undo at the end of the block, however it ends, unless `Undo.forget` was called.

    >>> class Settings: ...
    >>> with undoing() as undo:
    ...     undo.set(Settings, "depth", 2)
    >>> hasattr(Settings, "depth")
    False
    """
    undo = Undo()
    try:
        yield undo
    finally:
        try:
            with uninterrupted():
                undo.run()
        finally:  # of a signal before the delay began
            with uninterrupted():
                undo.run()


@contextmanager
def all_or_nothing() -> Iterator[Undo]:
    """Undo the edits of a block that raises; signals wait until it ends. Keep the block short.

    >>> class Settings: ...
    >>> with all_or_nothing() as undo:
    ...     undo.set(Settings, "depth", 2)
    >>> Settings.depth
    2
    """
    with uninterrupted(), undoing() as undo:
        yield undo
        undo.forget()
