"""Base class of language modelling: a text cut into blocks or lines, each token predicted once."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from wellposed.errors import ConfigError, DataError
from wellposed.tasks.batches import Rows, bucketed_batches, pad_examples, shuffle_key
from wellposed.tasks.data.splits import Split
from wellposed.tasks.objectives import IGNORED_LABEL, frequency_entropy, perplexity
from wellposed.tasks.task import Batch, Example, Kind, Sums, TokenTask

if TYPE_CHECKING:
    from torch import Tensor

    from wellposed.tasks.text.tokenizers import Encoded


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
        self.tokens, self.token_bytes = tokens, token_bytes
        self.stride = seq_len - 1
        self._slots = len(self) + 1
        self.num_offsets = min(self.stride, len(tokens) - 1)
        """Number of different cuts."""

    def __len__(self) -> int:
        return self._count(0)

    def indices(self, offset: int) -> list[int]:
        """Return the indices of the blocks of one cut, in the order of the text."""
        return [offset * self._slots + block for block in range(self._count(offset))]

    def sizes(self, offset: int) -> dict[int, int]:
        """Return the tokens of each block of one cut by its index."""
        spans = {index: self.bounds(index) for index in self.indices(offset)}
        return {index: stop - start for index, (start, stop) in spans.items()}

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
        if self.token_bytes is None:
            return block
        return {**block, "label_bytes": self.token_bytes[start:stop].tolist()}


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
        self.num_offsets = 1

    def bounds(self, index: int) -> tuple[int, int]:
        """Return the first token of a line and the one after its last."""
        return int(self._starts[index]), int(self._stops[index])

    def _count(self, offset: int) -> int:
        del offset
        return len(self._starts)


class LanguageModelTask(TokenTask[BlockDataset]):
    """Prediction of the next token of a text; a subclass says what a token is and where the texts
    come from.

    The metric is the mean of -ln p over all tokens but the first of a split. The context restarts
    at every block, and train blocks are cut at an offset drawn by (seed, epoch). The reference is
    the entropy of valid's own token frequencies, which no predictor that ignores the context is
    below.
    """

    kind: ClassVar[Kind] = "causal_lm"
    higher_is_better: ClassVar[bool] = False
    noun: ClassVar[str]
    """What a token is."""
    nats_name: ClassVar[str]
    """Name of the mean of -ln p."""

    def __init__(
        self,
        *,
        encoded: Mapping[Split, Encoded],
        seq_len: int,
        described: Mapping[str, Any],
        cut: Callable[..., BlockDataset] = BlockDataset,
        **parts: Any,
    ) -> None:
        blocks: dict[Split, BlockDataset] = {}
        for split, found in encoded.items():
            held = {} if found.token_bytes is None else {"token_bytes": found.token_bytes}
            where = f"{described['source']} ({split})"
            blocks[split] = cut(found.ids.flat, seq_len=seq_len, where=where, **held)
        unknown = {split: found.unknown_description() for split, found in encoded.items()}
        described = {**described, f"unknown_{self.noun}s": unknown}
        super().__init__(examples=blocks, max_length=seq_len, described=described, **parts)

    def lengths(self, split: Split) -> Sequence[int]:
        return list(self._examples[split].sizes(0).values())

    def batches(self, split: Split, batch_size: int, *, seed: int, epoch: int) -> list[list[int]]:
        blocks, key = self._examples[split], shuffle_key(split, seed, epoch)
        draw = random.Random(f"offset/{key}").randrange
        offset = draw(blocks.num_offsets) if split == "train" else 0
        return bucketed_batches(blocks.sizes(offset), batch_size, shuffle=key)

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Return padded ids and, as labels, the same ids unshifted, -100 on padding."""
        batch = pad_examples(examples, pad_id=self._encoder.pad_id)
        ids, padding = batch["input_ids"], batch["attention_mask"] == 0
        return {**batch, "labels": ids.masked_fill(padding, IGNORED_LABEL)}

    def metric_sums(self, logits: Tensor, batch: Batch) -> Sums:
        total, count = self.loss_sum(logits.detach(), batch)
        return {self.nats_name: (float(total), float(count))}

    def summarize(self, totals: Sums) -> dict[str, float]:
        total, count = totals[self.nats_name]
        return self._metrics(total / count)

    def reference(self) -> dict[str, float]:
        return self._metrics(frequency_entropy(self._examples["valid"].tokens[1:]))

    def _metrics(self, nats: float) -> dict[str, float]:
        """Return the metrics of a mean of -ln p."""
        return {self.nats_name: nats, "perplexity": perplexity(nats)}

    def _describe_examples(self) -> dict[str, Any]:
        return {
            "seq_len": self._max_length,
            "blocks": {split: len(blocks) for split, blocks in self._examples.items()},
            "predicted": (
                f"every {self.noun} of a split but its first, once; context restarts at every block"
            ),
        }
