"""A text as lines for a language model: every token but the first is predicted exactly once, in the
line it is of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from wellposed.tasks.batches.blocks import BlockDataset

if TYPE_CHECKING:
    from numpy.typing import NDArray


class LineDataset(BlockDataset):
    """One line an example, with the line feed that ends it, after the line feed that ended the line
    before it.

    That line feed is the start token of a line, and only context, so that the lines' predictions
    are a partition of tokens 1..N-1, as those of blocks are. A line of more than ``seq_len`` tokens
    is cut into pieces that overlap by one token. There is one cut, whatever the epoch.

    >>> lines = LineDataset(np.array([5, 6, 0, 7, 8, 9, 0]), line_feed=0, seq_len=3, where="text")
    >>> [line["input_ids"] for line in lines]
    [[5, 6, 0], [0, 7, 8], [8, 9, 0]]
    """

    def __init__(
        self, tokens: NDArray[np.integer], *, line_feed: int, seq_len: int, where: str
    ) -> None:
        feeds = np.flatnonzero(tokens[:-1] == line_feed)
        starts, stops = np.append(0, feeds), np.append(feeds + 1, len(tokens))
        pieces = -((1 - (stops - starts)) // max(1, seq_len - 1))
        place = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self._starts = np.repeat(starts, pieces) + place * (seq_len - 1)
        self._stops = np.minimum(self._starts + seq_len, np.repeat(stops, pieces))
        super().__init__(tokens, seq_len=seq_len, where=where)

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def num_offsets(self) -> int:
        """One: lines are cut where they end."""
        return 1

    def indices(self, offset: int) -> list[int]:
        """Return the indices of all lines, in the order of the text."""
        del offset
        return list(range(len(self)))

    def bounds(self, index: int) -> tuple[int, int]:
        """Return the first token of a line and the one after its last."""
        return int(self._starts[index]), int(self._stops[index])
