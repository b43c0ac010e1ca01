"""Model edits recorded in config.json, so that loading repeats them, and the attention it names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from wellposed.errors import CheckpointError
from wellposed.interrupts import Undo

NAME = "wellposed"
"""Attribute of a Hugging Face configuration, and key in ``config.json``, for the edits."""


def record(config: Any, undo: Undo, **changes: Any) -> None:
    """Note ``changes`` in ``config``, in addition to earlier ones, and in ``undo`` how to revert."""
    undo.set(config, NAME, {**recorded(config), **changes})


def recorded(config: Any) -> Mapping[str, Any]:
    """Return the changes noted in ``config``, if any; `CheckpointError` if malformed."""
    changes = getattr(config, NAME, None) or {}
    norms = changes.get("removed_norms", []) if isinstance(changes, Mapping) else None
    sound = isinstance(norms, list) and all(isinstance(name, str) for name in norms)
    if not sound or not isinstance(changes.get("attention", ""), str):
        raise CheckpointError(
            f"{NAME} of {type(config).__name__} (config.json): expected removed_norms, a list of"
            f" names, and attention, a name; received {changes!r}; copy config.json again"
            " from an intact checkpoint"
        )
    return changes


ATTENTIONS = ("wellposed_l2", "wellposed_cosine")
"""Names of our attention in transformers."""


def parts_of(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the configurations inside that of a composite model, with their names."""
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if hasattr(part, "sub_configs"):
            yield name, part


def attention_of(config: Any) -> Any:
    """Return the ``attn_implementation`` of our attention in ``config`` and its parts, or None."""
    name = getattr(config, "_attn_implementation", None)
    name = name if name in ATTENTIONS else None
    parts = {key: attention_of(part) for key, part in parts_of(config)}
    return name if all(part == name for part in parts.values()) else {"": name, **parts}
