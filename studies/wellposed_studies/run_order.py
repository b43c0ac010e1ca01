"""Order of runs by size: what they read, then steps, width, depth, batch and seeds; no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

from wellposed_studies.recipe import SCALES

Order = Literal[-1, 0, 1]
"""Smaller, alike, larger."""
ORDERED = ("steps", "width", "depth", "batch", "seeds")
"""Fields of a size that order runs which read alike, the first that differs deciding."""
COUNTED = ("characters", "words", "sentences", "texts", "pairs", "dialogues", "rows", "examples")
"""Units of what is read."""
_COUNT = re.compile(rf"([\d,]+) (?:of [\d,]+ )?({'|'.join(COUNTED)})\b")
Counts: TypeAlias = tuple[tuple[str, int], ...]
"""Unit and number of each text that is read; a text of unknown length is its own unit, once."""


def order_of_sizes(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> Order | None:
    """Return whether one size is smaller than, like or larger than another; None if it is not known.

    The larger reading decides, and the first of `ORDERED` that differs if both read alike. Sizes that
    were not recorded, or that read other units, or more of one text and less of another, have no order.

    >>> small = {"read": "800 texts", "steps": 400, "width": 32, "depth": 2, "batch": 16, "seeds": 3}
    >>> order_of_sizes(small, {**small, "read": "900 texts", "steps": 9})
    -1
    >>> order_of_sizes({**small, "depth": "1, 2"}, small), order_of_sizes(small, None)
    (1, None)
    """
    if not one or not other:
        return None
    if one["read"] != other["read"]:
        by_read = _order_of_counts(_counts(one["read"]), _counts(other["read"]))
        if by_read != 0:
            return by_read

    for field in ORDERED:
        if one[field] == other[field]:
            continue
        mine = _extent(one[field])
        theirs = _extent(other[field])
        if mine is None or theirs is None:
            return None
        if mine != theirs:
            return _larger(mine > theirs)

    return 0


def order_of_runs(one: Mapping[str, Any], other: Mapping[str, Any]) -> Order:
    """Return the order of two runs: that of their sizes, else of their scales."""
    by_size = order_of_sizes(one.get("size"), other.get("size"))
    if by_size:
        return by_size
    ranks = [SCALES.index(run["scale"]) for run in (one, other)]
    return 0 if ranks[0] == ranks[1] else _larger(ranks[0] > ranks[1])


def larger_than(size: Mapping[str, Any] | None, runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the runs that are larger than a size, by scale and commit."""
    return [run_name(run) for run in runs if order_of_sizes(run.get("size"), size) == 1]


def not_compared(size: Mapping[str, Any] | None, runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the runs whose size has no order with a size, with what is known of theirs."""
    reasons = []
    for run in runs:
        if order_of_sizes(run.get("size"), size) is None:
            size_words = f"read {run['size']['read']}" if run.get("size") else "size not recorded"
            reasons.append(f"{run_name(run)} ({size_words})")
    return reasons


def run_name(run: Mapping[str, Any]) -> str:
    """Return scale and commit of a run: ``mini at 104f6e9f``."""
    return f"{run['scale']} at {str(run['commit'] or 'an unknown commit')[:8]}"


def _larger(yes: bool) -> Order:
    return 1 if yes else -1


def _counts(read: str) -> Counts:
    counts = []
    for text in read.split("; "):
        match = _COUNT.search(text)
        counts.append((text, 1) if match is None else (match[2], _number(match[1])))
    return tuple(counts)


def _order_of_counts(one: Counts, other: Counts) -> Order | None:
    if [unit for unit, _ in one] != [unit for unit, _ in other]:
        return None
    pairs = [(mine, theirs) for (_, mine), (_, theirs) in zip(one, other, strict=True)]
    more = any(mine > theirs for mine, theirs in pairs)
    less = any(mine < theirs for mine, theirs in pairs)
    if more and less:
        return None
    return _larger(more) if more or less else 0


def _extent(value: int | str) -> tuple[int, int] | None:
    """Return the largest of the numbers of a field, and how many there are; None without numbers."""
    words = re.sub(r"\(.*?\)", "", str(value))
    numbers = re.findall(r"\d+(?:,\d{3})*", words)
    return (max(map(_number, numbers)), len(numbers)) if numbers else None


def _number(digits: str) -> int:
    return int(digits.replace(",", ""))
