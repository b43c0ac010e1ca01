"""Hooks that do not keep the object that made them alive, and end with it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class WhileAlive:
    """Call a method that returns a bool, without keeping its object alive; False after its end.

    A copy, or a pickle, returns False: it belongs to no object.
    """

    def __init__(self, method: Callable[[], bool] | None) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)

    def __call__(self) -> bool:
        method = None if self._method is None else self._method()
        return method is not None and method()

    def __reduce__(self) -> tuple[Any, ...]:
        return WhileAlive, (None,)


def end_with(owner: object, end: Callable[[], None]) -> None:
    """Call ``end``, which must not refer to ``owner``, if ``owner`` is deleted."""
    weakref.finalize(owner, end).atexit = False
