"""Batches of indices: grouped by length so that padding is small, shuffled by (seed, epoch), never by the model."""

from __future__ import annotations

import random
from collections.abc import Sequence

from wellposed.errors import ConfigError

POOL_BATCHES = 50


def bucketed_batches(
    lengths: Sequence[int], batch_size: int, *, shuffle: str, indices: Sequence[int] | None = None
) -> list[list[int]]:
    """Partition examples into batches of similar length; the partition is a function of its arguments alone.

    Indices are shuffled, cut into pools of 50 batches, each pool is sorted by length and cut into batches, and the
    batches are shuffled: the composition and the order stay random, the padding of a batch is small.

    Args:
        lengths: tokens per example, read as ``lengths[index]``.
        batch_size: examples in a batch; only one batch may be smaller.
        shuffle: text that seeds the shuffling, for example ``"train/seed/epoch"``; equal text, equal batches.
        indices: the examples to use; all where not given.

    Returns:
        Batches of indices; every index is in exactly one.

    Raises:
        ConfigError: batch_size is below 1.

    >>> bucketed_batches([5, 1, 4, 2], 2, shuffle="a")
    [[3, 1], [0, 2]]
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size = {batch_size}, expected at least 1")
    order = list(range(len(lengths)) if indices is None else indices)
    generator = random.Random(shuffle)
    generator.shuffle(order)
    batches: list[list[int]] = []
    pool_size = batch_size * POOL_BATCHES
    for start in range(0, len(order), pool_size):
        pool = sorted(order[start : start + pool_size], key=lambda index: -lengths[index])
        batches += [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]
    generator.shuffle(batches)
    return batches


def shuffle_key(split: str, seed: int, epoch: int) -> str:
    """Return the text that seeds a split's order: constant for valid and test, by (seed, epoch) for train."""
    return f"train/{seed}/{epoch}" if split == "train" else split
