"""Compiled models run uncompiled while hooks must see them; the last who asked restores the stance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from wellposed.interrupts import undoing, uninterrupted

_EAGER = "force_eager"
_OWNERS: set[int] = set()
"""Ids of what needs uncompiled calls now."""
_BEFORE: list[Any] = []
"""The stance that the last owner restores."""


def begin_eager(owner: object) -> None:
    """Switch compilation off until `end_eager` of the last owner."""
    with uninterrupted():
        if not _OWNERS:
            _BEFORE[:] = [torch.compiler.set_stance(_EAGER)]
        _OWNERS.add(id(owner))


def end_eager(owner: object) -> None:
    """Restore how compiled calls ran, if this is the last owner and nobody changed it since."""
    with uninterrupted():
        _OWNERS.discard(id(owner))
        if _OWNERS or not _BEFORE:
            return
        current = torch.compiler.set_stance("default")  # the only public way to read the stance
        is_ours = current.prev.stance == _EAGER  # pyright: ignore[reportAttributeAccessIssue]
        (_BEFORE[0] if is_ours else current).__exit__(None, None, None)
        _BEFORE.clear()


@contextmanager
def eager_calls() -> Iterator[None]:
    """Run compiled modules uncompiled in the block.

    Prefer it to ``with torch.compiler.set_stance(...)``, which sets the stance before the block is
    entered, so that an interrupt in between leaves it for good.
    """
    owner = object()
    with undoing() as undo:
        undo.later(end_eager, owner)
        begin_eager(owner)
        yield
