"""Batches: which examples go together, and their tensors, padded on the right.

Batches are grouped by length so that padding is small, and shuffled by (seed, epoch), never by the
model.
"""

from __future__ import annotations

import itertools
import random
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar, overload

import numpy as np

from wellposed.errors import ConfigError
from wellposed.tasks.objectives import IGNORED_LABEL
from wellposed.tasks.task import Example

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

Element = TypeVar("Element")


class Rows(Sequence[Element]):
    """A sequence from its length and `_row`, which makes the element of an index; a slice makes a
    list.

    >>> class Squares(Rows[int]):
    ...     def __len__(self) -> int:
    ...         return 4
    ...
    ...     def _row(self, index: int) -> int:
    ...         return range(4)[index] ** 2
    >>> Squares()[-1], Squares()[1:3], list(Squares())
    (9, [1, 4], [0, 1, 4, 9])
    """

    @abstractmethod
    def _row(self, index: int) -> Element:
        """Return the element of an index; a negative one counts from the end."""

    @overload
    def __getitem__(self, index: int) -> Element: ...
    @overload
    def __getitem__(self, index: slice) -> list[Element]: ...
    def __getitem__(self, index: int | slice) -> Element | list[Element]:
        if isinstance(index, slice):
            return [self._row(i) for i in range(len(self))[index]]
        return self._row(index)

    def __iter__(self) -> Iterator[Element]:
        return (self._row(index) for index in range(len(self)))


class Ragged:
    """Row i is ``flat[offsets[i] : offsets[i + 1]]``.

    >>> rows = Ragged(np.array([5, 6, 7]), np.array([2, 1]))
    >>> rows[0].tolist(), rows[1].tolist(), len(rows), rows.lengths.tolist()
    ([5, 6], [7], 2, [2, 1])
    """

    def __init__(
        self, flat: NDArray[np.integer], lengths: NDArray[np.integer] | Sequence[int]
    ) -> None:
        self.flat = flat
        self.lengths: NDArray[np.int64] = np.asarray(lengths, dtype=np.int64)
        self._offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        """Build from one list of token ids per row."""
        lengths = [len(row) for row in rows]
        return cls(
            np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int32, count=sum(lengths)),
            lengths,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> NDArray[np.integer]:
        index = range(len(self))[index]
        return self.flat[self._offsets[index] : self._offsets[index + 1]]

    def __iter__(self) -> Iterator[NDArray[np.integer]]:
        return (self[index] for index in range(len(self)))

    def truncated(self, max_length: int) -> Ragged:
        """Return the first ``max_length`` tokens of every row."""
        within = np.arange(len(self.flat)) - np.repeat(self._offsets[:-1], self.lengths)
        return Ragged(self.flat[within < max_length], np.minimum(self.lengths, max_length))


def pad_right(rows: Sequence[Sequence[int]], value: int) -> NDArray[np.int64]:
    """Return rows as (rows, longest) with ``value`` after the end of the shorter ones.

    >>> pad_right([[1, 2], [3]], 0).tolist()
    [[1, 2], [3, 0]]
    """
    padded = np.full((len(rows), max(map(len, rows))), value, dtype=np.int64)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


POOL_BATCHES = 50
Cut: TypeAlias = Callable[[list[int]], list[list[int]]]


def bucketed_batches(
    lengths: Sequence[int], batch_size: int, *, shuffle: str, indices: Sequence[int] | None = None
) -> list[list[int]]:
    """Partition examples into batches of similar length; the partition is a function of its
    arguments alone.

    Indices (all, where not given) are shuffled, cut into pools of 50 batches, each pool is sorted
    by length and cut into batches, and the batches are shuffled: composition and order stay random,
    and the padding of a batch is small. Only one batch may be smaller than ``batch_size``.
    ``shuffle`` is a text that seeds the shuffling.

    >>> bucketed_batches([5, 1, 4, 2], 2, shuffle="a")
    [[3, 1], [0, 2]]
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size = {batch_size}, expected at least 1")

    def cut(pool: list[int]) -> list[list[int]]:
        pool.sort(key=lambda index: -lengths[index])
        return [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]

    order = list(range(len(lengths)) if indices is None else indices)
    return _pooled(order, batch_size, cut, shuffle)


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

    def cut(pool: list[int]) -> list[list[int]]:
        pool.sort(key=lambda index: (-targets[index], -sources[index]))
        batches: list[list[int]] = []
        width = 0
        for index in pool:
            side = max(sources[index], targets[index])
            size, width = len(batches[-1]) + 1 if batches else 1, max(width, side)
            if size == 1 or size > batch_size or width * size > tokens:
                batches.append([])
                width = side
            batches[-1].append(index)
        return batches

    mean = max(1.0, sum(targets) / max(1, len(targets)))
    size = max(1, min(batch_size, int(tokens / mean)))
    return _pooled(list(range(len(sources))), size, cut, shuffle)


def _pooled(order: list[int], batch_size: int, cut: Cut, shuffle: str) -> list[list[int]]:
    """Return shuffled batches that ``cut`` makes of pools of `POOL_BATCHES` batches."""
    generator = random.Random(shuffle)
    generator.shuffle(order)
    size = batch_size * POOL_BATCHES
    pools = (order[start : start + size] for start in range(0, len(order), size))
    batches = [batch for pool in pools for batch in cut(pool)]
    generator.shuffle(batches)
    return batches


def shuffle_key(split: str, seed: int, epoch: int) -> str:
    """Return the text that seeds a split's order: constant for valid and test, by (seed, epoch) for
    train."""
    return f"train/{seed}/{epoch}" if split == "train" else split


def collate_causal_lm(examples: Sequence[Example], *, pad_id: int) -> dict[str, Tensor]:
    """Return input_ids, attention_mask and unshifted labels, (batch, tokens) int64; labels are -100
    on padding.

    The label_bytes of examples that have them are returned too, 0 on padding.

    >>> batch = collate_causal_lm([{"input_ids": [5, 6]}, {"input_ids": [7]}], pad_id=0)
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[5, 6], [7, 0]], [[5, 6], [7, -100]])
    """
    import torch

    batch = pad_inputs(examples, pad_id=pad_id)
    labels = torch.where(batch["attention_mask"] == 1, batch["input_ids"], IGNORED_LABEL)
    return {**batch, "labels": labels, **_padded(examples, "label_bytes")}


def collate_classification(examples: Sequence[Example], *, pad_id: int) -> dict[str, Tensor]:
    """Return input_ids, attention_mask (batch, tokens) and labels (batch,), all int64.

    Examples with token_type_ids, pairs in one sequence, give those too, 0 on padding. Examples of
    two documents give input_ids_pair and attention_mask_pair too; each side is padded to its own
    longest.

    >>> examples = [{"input_ids": [5, 6], "labels": [1]}, {"input_ids": [7], "labels": [0]}]
    >>> batch = collate_classification(examples, pad_id=0)
    >>> batch["attention_mask"].tolist(), batch["labels"].tolist()
    ([[1, 1], [1, 0]], [1, 0])
    """
    import torch

    batch = pad_inputs(examples, pad_id=pad_id) | _padded(examples, "token_type_ids")
    if "input_ids_pair" in examples[0]:
        second = pad_inputs(examples, pad_id=pad_id, name="input_ids_pair")
        batch |= {f"{name}_pair": value for name, value in second.items()}
    return {**batch, "labels": torch.tensor([each["labels"][0] for each in examples])}


def collate_seq2seq(examples: Sequence[Example], *, pad_id: int, bos_id: int) -> dict[str, Tensor]:
    """Return input_ids, attention_mask (batch, source), decoder_input_ids and labels (batch,
    target), all int64.

    The decoder reads the target moved right by one after ``bos_id``: position t predicts
    ``labels[:, t]``, so nothing is shifted later. Labels are -100 on padding; the decoder's inputs
    need no mask, as padding comes after the end.

    >>> batch = collate_seq2seq([{"input_ids": [5, 3], "labels": [7, 8, 3]}, {"input_ids": [6, 9, 3], "labels": [3]}],
    ...                         pad_id=0, bos_id=2)
    >>> batch["decoder_input_ids"].tolist(), batch["labels"].tolist()
    ([[2, 7, 8], [2, 0, 0]], [[7, 8, 3], [3, -100, -100]])
    """
    import torch

    targets = [example["labels"] for example in examples]
    shifted = [[bos_id, *target[:-1]] for target in targets]
    return {
        **pad_inputs(examples, pad_id=pad_id),
        "decoder_input_ids": torch.from_numpy(pad_right(shifted, pad_id)),
        "labels": torch.from_numpy(pad_right(targets, IGNORED_LABEL)),
    }


def _padded(examples: Sequence[Example], name: str) -> dict[str, Tensor]:
    """Return ``name`` of examples that have it, 0 on padding."""
    if name not in examples[0]:
        return {}
    import torch

    return {name: torch.from_numpy(pad_right([row[name] for row in examples], 0))}


def pad_inputs(
    examples: Sequence[Example], *, pad_id: int, name: str = "input_ids"
) -> dict[str, Tensor]:
    """Return the ids ``name`` of examples as input_ids and attention_mask, padded to the
    longest."""
    import torch

    rows = [example[name] for example in examples]
    mask = [[1] * len(row) for row in rows]
    return {
        "input_ids": torch.from_numpy(pad_right(rows, pad_id)),
        "attention_mask": torch.from_numpy(pad_right(mask, 0)),
    }
