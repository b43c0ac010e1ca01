"""Compiled models run uncompiled while a monitor measures, so that its hooks see them."""

from __future__ import annotations

from typing import Any

import torch

from wellposed.interrupts import uninterrupted

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
