"""A text as blocks for a language model: every token but the first is predicted exactly once, at
any offset."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wellposed.errors import ConfigError, DataError
from wellposed.tasks.batches.rows import Rows
from wellposed.tasks.task import Example

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class BlockDataset(Rows[Example]):
    """Blocks of ``seq_len`` tokens, each starting with the last token of the block before it.

    A block of n tokens holds n - 1 predictions, so the one-token overlap makes the blocks'
    predictions a partition of tokens 1..N-1. Index ``b`` below ``len(self)`` is block b at offset
    0. The text can also be cut at an offset o in 1..seq_len-2: first a block of o + 1 tokens, then
      full ones. Those blocks have the indices of `indices(o)`,
    all above ``len(self)``, so that an epoch's cut is part of its batches and needs no state. Where
    the bytes that each token stands for are known, they are the ``label_bytes`` of a block.

    >>> import numpy as np
    >>> blocks = BlockDataset(np.arange(6), seq_len=3, where="text")
    >>> [block["input_ids"] for block in blocks]
    [[0, 1, 2], [2, 3, 4], [4, 5]]
    >>> [blocks[index]["input_ids"] for index in blocks.indices(1)]
    [[0, 1], [1, 2, 3], [3, 4, 5]]
    """

    def __init__(
        self,
        tokens: NDArray[np.integer],
        *,
        seq_len: int,
        where: str,
        token_bytes: NDArray[np.integer] | None = None,
    ) -> None:
        if seq_len < 2:
            raise ConfigError(
                f"seq_len = {seq_len}, expected at least 2: a block predicts seq_len - 1 tokens"
            )
        if len(tokens) < 2:
            raise DataError(
                f"{where}: {len(tokens)} tokens, expected at least 2: the first one is only context"
            )
        self.tokens = tokens
        self.token_bytes = token_bytes
        self.stride = seq_len - 1
        self._slots = len(self) + 1

    def __len__(self) -> int:
        return self._count(0)

    @property
    def num_offsets(self) -> int:
        """Number of different cuts."""
        return min(self.stride, len(self.tokens) - 1)

    def indices(self, offset: int) -> list[int]:
        """Return the indices of the blocks of one cut, in the order of the text."""
        return [offset * self._slots + block for block in range(self._count(offset))]

    def bounds(self, index: int) -> tuple[int, int]:
        """Return the first token of a block and the one after its last."""
        offset, block = divmod(index, self._slots)
        if not (0 <= offset < self.num_offsets and block < self._count(offset)):
            raise IndexError(f"no block has index {index}")
        if offset and block == 0:
            return 0, offset + 1
        start = offset + (block - (offset > 0)) * self.stride
        return start, min(start + self.stride + 1, len(self.tokens))

    def _count(self, offset: int) -> int:
        return (offset > 0) - ((offset - (len(self.tokens) - 1)) // self.stride)

    def _row(self, index: int) -> Example:
        start, stop = self.bounds(index + len(self) if index < 0 else index)
        block = {"input_ids": self.tokens[start:stop].tolist()}
        return (
            block
            if self.token_bytes is None
            else {**block, "label_bytes": self.token_bytes[start:stop].tolist()}
        )


class BlockLengths(Rows[int]):
    """Tokens per block, by the same indices as the blocks."""

    def __init__(self, blocks: BlockDataset) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def _row(self, index: int) -> int:
        start, stop = self._blocks.bounds(index + len(self) if index < 0 else index)
        return stop - start
