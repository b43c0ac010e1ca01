"""Batches: which examples go together, and their tensors, padded on the right. They are grouped by
length to save padding, and shuffled by (seed, epoch), never by the model."""

from __future__ import annotations

import itertools
import random
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from wellposed.errors import ConfigError
from wellposed.lazy import ModuleOnFirstUse

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor
else:
    np = ModuleOnFirstUse("numpy")

Element = TypeVar("Element")
Example: TypeAlias = "dict[str, list[int]]"
IGNORED_LABEL = -100
"""Label of a position without a prediction."""


class Rows(Sequence[Element]):
    """A sequence defined by its length and `_row`, which makes the element of an index.

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

    def __getitem__(self, index: Any) -> Any:
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
        lengths = [len(row) for row in rows]
        flat = itertools.chain.from_iterable(rows)
        return cls(np.fromiter(flat, dtype=np.int32, count=sum(lengths)), lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> NDArray[np.integer]:
        index = range(len(self))[index]
        return self.flat[self._offsets[index] : self._offsets[index + 1]]

    def __iter__(self) -> Iterator[NDArray[np.integer]]:
        return (self[index] for index in range(len(self)))

    def truncated(self, max_length: int) -> Ragged:
        within = np.arange(len(self.flat)) - np.repeat(self._offsets[:-1], self.lengths)
        return Ragged(self.flat[within < max_length], np.minimum(self.lengths, max_length))


def pad_right(rows: Sequence[Sequence[int]], value: int) -> NDArray[np.int64]:
    """Return rows as (rows, longest), padded on the right with ``value``.

    >>> pad_right([[1, 2], [3]], 0).tolist()
    [[1, 2], [3, 0]]
    """
    padded = np.full((len(rows), max(map(len, rows))), value, dtype=np.int64)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


POOL_BATCHES = 50


def bucketed_batches(
    lengths: Sequence[Any] | Mapping[int, Any], batch_size: int, *, shuffle: str, tokens: int = 0
) -> list[list[int]]:
    """Partition examples into batches of similar length, determined by the arguments alone.

    Indices (the keys of a mapping) are shuffled by the text ``shuffle`` and cut into pools of 50
    batches, each sorted by length and cut into batches; these are shuffled. Only one batch may be
    smaller than ``batch_size``. With ``tokens``, lengths are of target and source, and a batch of n
    pairs has at most ``tokens`` / n tokens on either side.

    >>> bucketed_batches([5, 1, 4, 2], 2, shuffle="a")
    [[3, 1], [0, 2]]
    >>> bucketed_batches([(5, 5), (1, 1), (3, 4), (2, 2)], 3, shuffle="a", tokens=8)
    [[2, 3], [0], [1]]
    """
    order = list(lengths if isinstance(lengths, Mapping) else range(len(lengths)))
    widths = {index: max(lengths[index]) for index in order} if tokens else {}
    longest = max(widths.values(), default=0)
    if batch_size < 1 or tokens < longest:
        limit = f"tokens_per_batch = {tokens}, expected at least {longest} (the longest sentence)"
        what = limit if tokens < longest else f"batch_size = {batch_size}, expected at least 1"
        raise ConfigError(what)

    def cut(pool: list[int]) -> list[list[int]]:
        pool.sort(key=lengths.__getitem__, reverse=True)
        if not tokens:
            return [pool[start : start + batch_size] for start in range(0, len(pool), batch_size)]

        batches: list[list[int]] = []
        width = 0
        for index in pool:
            size = len(batches[-1]) + 1 if batches else 1
            width = max(width, widths[index])
            if size == 1 or size > batch_size or width * size > tokens:
                batches.append([])
                width = widths[index]
            batches[-1].append(index)

        return batches

    usual = batch_size
    if tokens:
        mean = sum(lengths[index][0] for index in order) / max(1, len(order))
        usual = max(1, min(batch_size, int(tokens / max(1.0, mean))))
    generator = random.Random(shuffle)
    generator.shuffle(order)
    step = usual * POOL_BATCHES
    pools = (order[start : start + step] for start in range(0, len(order), step))
    batches = [batch for pool in pools for batch in cut(pool)]
    generator.shuffle(batches)
    return batches


def shuffle_key(split: str, seed: int, epoch: int) -> str:
    """Return the seed text of a split's order: by (seed, epoch) for train, else constant."""
    return f"train/{seed}/{epoch}" if split == "train" else split


PADDING = {"labels": IGNORED_LABEL, "label_bytes": 0, "token_type_ids": 0}
"""Padding of each kind of row; ids are padded with the padding token."""


def pad_examples(examples: Sequence[Example], *, pad_id: int) -> dict[str, Tensor]:
    """Return each list of the examples as an int64 tensor (examples, longest), with masks.

    Ids are padded with ``pad_id``, labels with -100, the rest with 0. The mask of
    ``input_ids_pair``, the second of two documents, is ``attention_mask_pair``.

    >>> batch = pad_examples([{"input_ids": [5, 6]}, {"input_ids": [7]}], pad_id=0)
    >>> batch["input_ids"].tolist(), batch["attention_mask"].tolist()
    ([[5, 6], [7, 0]], [[1, 1], [1, 0]])
    """
    import torch

    batch: dict[str, Tensor] = {}
    for name in examples[0]:
        rows = [example[name] for example in examples]
        batch[name] = torch.from_numpy(pad_right(rows, PADDING.get(name, pad_id)))
        if name.startswith("input_ids"):
            mask = pad_right([[1] * len(row) for row in rows], 0)
            batch[name.replace("input_ids", "attention_mask")] = torch.from_numpy(mask)
    return batch
