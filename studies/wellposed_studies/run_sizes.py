"""Sizes of trained models, for the row of a result: what they read, and how large they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wellposed_lab.training.config import RunConfig

READ_OPTIONS: Mapping[str, str] = {
    "limit_chars": "characters",
    "limit_words": "words",
    "limit_train": "texts",
    "limit_pairs": "pairs",
    "limit_dialogues": "dialogues",
    "num_train": "examples",
}
"""Options of tasks that say how much of train is read, and its unit."""
GREEDY = "greedy"
NO_DECODING = "none"


def size_of(configs: Sequence[RunConfig]) -> dict[str, Any] | None:
    """Return the size of the runs behind a verdict: what each field of `evidence.FIELDS` spans.

    None if nothing was trained. A limit above the data's size reads all of it.
    """
    if not configs:
        return None
    starts = dict.fromkeys(config.start.model for config in configs if config.start.model)
    encoder_name = f"as {', '.join(start.rpartition('/')[2] for start in starts)}" if starts else ""
    return {
        "read": "; ".join(dict.fromkeys(map(_read, configs))),
        "width": encoder_name or spanned_int(config.model.hidden_size for config in configs),
        "depth": encoder_name or spanned_int(config.model.num_hidden_layers for config in configs),
        "steps": spanned_int(config.train.steps for config in configs),
        "batch": spanned_int(config.train.batch_size for config in configs),
        "seeds": len({config.train.seed for config in configs}),
        "decoding": "; ".join(dict.fromkeys(map(_decoding, configs))),
    }


def spanned_int(values: Iterable[int]) -> int | str:
    """Return the one value, or all of them, as ``1, 2, 8``."""
    distinct = sorted(set(values))
    return distinct[0] if len(distinct) == 1 else ", ".join(f"{value:,}" for value in distinct)


def _read(config: RunConfig) -> str:
    options = config.task_options
    limits = [
        f"{options[name]:,} {unit}"
        for name, unit in READ_OPTIONS.items()
        if options.get(name) is not None
    ]
    return limits[0] if limits else f"all of {config.task}"


def _decoding(config: RunConfig) -> str:
    beams = config.task_options.get("generate_beams")
    if beams is None:
        return NO_DECODING
    return GREEDY if beams == 1 else f"{beams} beams"
