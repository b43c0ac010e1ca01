"""Kinds of evidence, the sizes of a result and its paper, and the words of verdicts; no torch.

Mathematics is confirmed or contradicted. A training below the paper's size shows that an effect is
seen or not seen at that size, and contradicts nothing.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

Kind = Literal["mathematics", "trained"]
"""Trained: below the paper's size. Mathematics: theorems, random weights, or the paper's own size."""
Verdict: TypeAlias = bool | str | None
KINDS: tuple[Kind, ...] = get_args(Kind)
VERDICTS: Mapping[Verdict, str] = {
    True: "confirmed",
    False: "contradicted",
    "smaller": "none of that size",
    None: "undecided",
}
"""Printed form of each verdict on mathematics. ``smaller``: a gain as large as claimed would have
been seen."""
SEEN: Mapping[Verdict, str] = {**VERDICTS, True: "seen", False: "not seen"}
"""Printed form of each verdict on smaller trainings, followed by "at SIZE"."""
_TABLES = tomllib.loads(Path(__file__).with_name("evidence.toml").read_text(encoding="utf-8"))
PAPER_SIZES: Mapping[str, Mapping[str, Any]] = _TABLES["paper_size"]
"""Size of the paper's experiment, by recipe."""
OWN: tuple[str, ...] = tuple(_TABLES["own"])
"""Recipes of claims of this project."""
SAME_RUNS: Mapping[str, str] = _TABLES["same_runs"]
"""Recipes that are one row with another recipe, since both read the same runs."""
FIELDS = ("read", "width", "depth", "steps", "batch", "seeds", "decoding")
"""Entries of a size: train data, and the rest by their usual names."""
_UNKNOWN = "not recorded"


def verdict_words(kind: Kind, holds: Verdict, size: Mapping[str, Any] | None) -> str:
    """Return the printed verdict; of a training with the size that it was seen at.

    >>> verdict_words("mathematics", False, None)
    'contradicted'
    >>> verdict_words("trained", False, {"read": "800 texts", "width": 32, "depth": 2})
    'not seen at 800 texts, width 32, depth 2'
    """
    return VERDICTS[holds] if kind == "mathematics" else f"{SEEN[holds]} at {short_size(size)}"


def short_size(size: Mapping[str, Any] | None) -> str:
    """Return what was read, width and depth."""
    if not size:
        return "a size that was not recorded"
    return f"{size['read']}, width {_shown(size['width'])}, depth {_shown(size['depth'])}"


def size_words(size: Mapping[str, Any] | None) -> str:
    """Return a size in one line.

    >>> size_words({"read": "9 texts", "width": 8, "depth": 1, "steps": 1200, "batch": 4, "seeds": 3,
    ...     "decoding": "none"})
    'read 9 texts; width 8; depth 1; 1,200 steps of 4; seeds: 3; decoding: none'
    """
    if not size:
        return _UNKNOWN
    return (
        f"read {size['read']}; width {_shown(size['width'])}; depth {_shown(size['depth'])}; {steps_words(size)};"
        f" seeds: {_shown(size['seeds'])}; decoding: {size['decoding']}"
    )


def steps_words(size: Mapping[str, Any]) -> str:
    """Return steps and batch: ``1,200 steps of 4``."""
    return f"{_shown(size['steps'])} steps of {_shown(size['batch'])}"


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
