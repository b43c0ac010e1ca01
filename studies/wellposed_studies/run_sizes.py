"""Sizes of trained models, for the row of a result: what they read, and how large they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellposed.finite_json import from_json

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
UNITS_OF_TASKS: Mapping[str, str] = {"minbert": "rows of each set"}
"""Unit of the option in tasks of several sets."""
GREEDY = "greedy"
NO_DECODING = "none"


def size_of(configs: Sequence[RunConfig]) -> dict[str, Any] | None:
    """Return the size of the runs behind a verdict: what each field of `evidence.FIELDS` spans.

    None if nothing was trained. A limit above the data's size reads all of it.
    """
    if not configs:
        return None
    return {
        "read": "; ".join(dict.fromkeys(map(_read, configs))),
        "width": _of_models(configs, "hidden_size"),
        "depth": _of_models(configs, "num_hidden_layers"),
        "steps": spanned_int(config.train.steps for config in configs),
        "batch": spanned_int(config.train.batch_size for config in configs),
        "seeds": len({config.train.seed for config in configs}),
        "decoding": "; ".join(dict.fromkeys(map(_decoding, configs))),
    }


def _of_models(configs: Sequence[RunConfig], option: str) -> int | str:
    """Return an option of all models; of a model to start from as its own config.json has it."""
    starts = dict.fromkeys(config.start.model for config in configs if config.start.model)
    if not starts:
        return spanned_int(getattr(config.model, option) for config in configs)
    return ", ".join(_of_start(start, option) for start in starts)


def _of_start(start: str, option: str) -> str:
    name = start.rpartition("/")[2]
    try:
        value = from_json((Path(start) / "config.json").read_bytes())[option]
    except (OSError, ValueError, KeyError):  # a name on the hub, or another model's word for it
        return f"as {name}"
    return f"{value:,} (as {name})"


def spanned_int(values: Iterable[int]) -> int | str:
    """Return the one value, or all of them, as ``1, 2, 8``."""
    distinct = sorted(set(values))
    return distinct[0] if len(distinct) == 1 else ", ".join(f"{value:,}" for value in distinct)


def _read(config: RunConfig) -> str:
    options = config.task_options
    limits = [
        f"{options[name]:,} {UNITS_OF_TASKS.get(config.task, unit)}"
        for name, unit in READ_OPTIONS.items()
        if options.get(name) is not None
    ]
    return limits[0] if limits else f"all of {config.task}"


def _decoding(config: RunConfig) -> str:
    beams = config.task_options.get("generate_beams")
    if beams is None:
        return NO_DECODING
    return GREEDY if beams == 1 else f"{beams} beams"
