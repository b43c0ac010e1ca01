"""Hooks that do not keep the object that made them alive, and end with it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any


class WhileAlive:
    """Call a method that returns a bool, without keeping its object alive; False after its end.

    A copy, or a pickle, returns False: it belongs to no object.
    """

    def __init__(self, method: MethodType | None) -> None:
        # Compiled graphs read a plain weak reference; a WeakMethod breaks them.
        self._owner = None if method is None else weakref.ref(method.__self__)
        self._function = None if method is None else method.__func__

    def __call__(self) -> bool:
        owner = None if self._owner is None else self._owner()
        if owner is None or self._function is None:
            return False
        return self._function(owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return WhileAlive, (None,)


def end_with(owner: object, end: Callable[[], None]) -> None:
    """Call ``end``, which must not refer to ``owner``, if ``owner`` is deleted."""
    weakref.finalize(owner, end).atexit = False
