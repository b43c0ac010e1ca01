"""Model edits recorded in config.json so that loading can redo them, and the attention that a
configuration names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from wellposed.errors import CheckpointError

NAME = "wellposed"
"""The attribute of a Hugging Face configuration, and the key of ``config.json``, that holds
them."""


def record(config: Any, **changes: Any) -> None:
    """Note ``changes`` in ``config``, beside those that are noted already.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace()
    >>> record(config, removed_norms=["norm"])
    >>> record(config, attention="wellposed_l2")
    >>> config.wellposed
    {'removed_norms': ['norm'], 'attention': 'wellposed_l2'}
    """
    setattr(config, NAME, {**recorded(config), **changes})


def recorded(config: Any) -> Mapping[str, Any]:
    """Return the changes noted in ``config``; none where it has no note.

    Raises:
        CheckpointError: a note of another form.

    >>> recorded(object())
    {}
    """
    changes = getattr(config, NAME, None) or {}
    norms = changes.get("removed_norms", []) if isinstance(changes, Mapping) else None
    sound = isinstance(norms, list) and all(isinstance(name, str) for name in norms)
    if not sound or not isinstance(changes.get("attention", ""), str):
        raise CheckpointError(
            f"{NAME} of {type(config).__name__} (config.json): expected removed_norms, a list of"
            f" names, and attention, a name; received {changes!r}; copy config.json again from"
            " where it was whole"
        )
    return changes


ATTENTIONS = ("wellposed_l2", "wellposed_cosine")
"""Our names of attention, which transformers takes."""


def parts_of(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the configurations inside one of a model of several parts, with their names."""
    for name in getattr(config, "sub_configs", {}):
        if hasattr(part := getattr(config, name, None), "sub_configs"):
            yield name, part


def attention_of(config: Any) -> Any:
    """Return the ``attn_implementation`` that gives ``config`` and its parts the attention of ours that
    they have; None without any.

    >>> from types import SimpleNamespace
    >>> attention_of(SimpleNamespace(_attn_implementation="wellposed_l2"))
    'wellposed_l2'
    """
    name = getattr(config, "_attn_implementation", None)
    name = name if name in ATTENTIONS else None
    parts = {key: attention_of(part) for key, part in parts_of(config)}
    return name if all(part == name for part in parts.values()) else {"": name, **parts}
