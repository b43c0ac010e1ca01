"""Batches of indices: grouped by length so that padding is small, shuffled by (seed, epoch), never
by the model."""

from __future__ import annotations

import random
from collections.abc import Sequence

from wellposed.errors import ConfigError

POOL_BATCHES = 50


def bucketed_batches(
    lengths: Sequence[int], batch_size: int, *, shuffle: str, indices: Sequence[int] | None = None
) -> list[list[int]]:
    """Partition examples into batches of similar length; the partition is a function of its
    arguments alone.

    Indices (all, where not given) are shuffled, cut into pools of 50 batches, each pool is sorted
    by length and cut
    into batches, and the batches are shuffled: composition and order stay random, and the padding
    of a batch is small. Only one batch may be smaller than ``batch_size``. ``shuffle`` is a text
    that seeds the shuffling.

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


def token_batches(
    sources: Sequence[int], targets: Sequence[int], tokens: int, batch_size: int, *, shuffle: str
) -> list[list[int]]:
    """Partition pairs into batches of at most ``batch_size`` pairs and ``tokens`` padded tokens on
    either side.

    A batch of n pairs counts as n times its longest side. Pairs are pooled, sorted by target and
    source length in a pool, cut, and the batches shuffled, as in `bucketed_batches`.

    >>> token_batches([5, 1, 4, 2], [5, 1, 3, 2], 8, 3, shuffle="a")
    [[2, 3], [0], [1]]
    """
    longest = max(max(sources, default=0), max(targets, default=0))
    if batch_size < 1 or tokens < longest:
        raise ConfigError(
            f"tokens_per_batch = {tokens} and batch_size = {batch_size}, expected at least"
            f" {longest} (the longest sentence of the split) and at least 1"
        )
    order = list(range(len(sources)))
    generator = random.Random(shuffle)
    generator.shuffle(order)
    mean = max(1.0, sum(targets) / max(1, len(targets)))
    pool_size = POOL_BATCHES * max(1, min(batch_size, int(tokens / mean)))
    batches: list[list[int]] = []
    for start in range(0, len(order), pool_size):
        pool = sorted(
            order[start : start + pool_size], key=lambda index: (-targets[index], -sources[index])
        )
        batches += _cut_by_tokens(pool, sources, targets, tokens, batch_size)
    generator.shuffle(batches)
    return batches


def _cut_by_tokens(
    pool: Sequence[int],
    sources: Sequence[int],
    targets: Sequence[int],
    tokens: int,
    batch_size: int,
) -> list[list[int]]:
    batches: list[list[int]] = []
    longest = 0
    for index in pool:
        width = max(longest, sources[index], targets[index])
        if batches and len(batches[-1]) < batch_size and width * (len(batches[-1]) + 1) <= tokens:
            batches[-1].append(index)
            longest = width
        else:
            batches.append([index])
            longest = max(sources[index], targets[index])
    return batches


def shuffle_key(split: str, seed: int, epoch: int) -> str:
    """Return the text that seeds a split's order: constant for valid and test, by (seed, epoch) for
    train."""
    return f"train/{seed}/{epoch}" if split == "train" else split
