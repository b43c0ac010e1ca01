"""Token sequences of different lengths in one flat array: a few bytes a token, where lists of
integers take eight."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
