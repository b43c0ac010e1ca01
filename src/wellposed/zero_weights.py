"""Weights under DeepSpeed ZeRO, recognised by the attributes that it sets on them; free of torch."""

from __future__ import annotations

from typing import Any

from wellposed.errors import ConfigError, shortened


def check_whole(call: str, model: Any) -> None:
    """Refuse a model whose weights ZeRO-3 keeps in parts: what a process has of them is empty.

    Raises:
        ConfigError: a weight has the attribute ``ds_id``, also if it is gathered for the moment.
    """
    weights: Any = getattr(model, "named_parameters", dict)()
    parts = [name for name, weight in weights if is_in_parts(weight)]
    if parts:
        raise ConfigError(
            f"{call}: DeepSpeed ZeRO-3 keeps these weights in parts, and gathers them for one layer at"
            f" a time: {shortened(parts)}. Train with ZeRO stage 1 or 2, DDP or FSDP2, or load the"
            " saved model into one process (docs/howto/machines.md)"
        )


def is_in_parts(weight: Any) -> bool:
    """Return whether ZeRO-3 has the weight, also if it is gathered for the moment."""
    return hasattr(weight, "ds_id")


def is_copied(weight: Any) -> bool:
    """Return whether ZeRO-1 or 2 steps a copy of the weight, which replaces it after each step."""
    return hasattr(weight, "_hp_mapping")
