"""What language models of characters and of words share: a text cut into blocks, nats per token."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from wellposed.tasks.batches.batching import bucketed_batches, shuffle_key
from wellposed.tasks.kinds.token_task import TokenTask
from wellposed.tasks.task import SPLITS, Example, Kind, Split

if TYPE_CHECKING:
    from torch import Tensor

    from wellposed.tasks.batches.blocks import BlockDataset
    from wellposed.tasks.text.tokenizers import Encoded, TextEncoder


class LanguageModelTask(TokenTask["BlockDataset"]):
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
        encoder: TextEncoder,
        texts: Mapping[Split, str],
        seq_len: int,
        source: Mapping[str, Any],
        details: Mapping[str, Any],
    ) -> None:
        encoded: dict[Split, Encoded] = {
            split: self._encode(encoder, texts[split]) for split in SPLITS
        }
        blocks: dict[Split, BlockDataset] = {
            split: self._cut(encoder, found, seq_len=seq_len, where=f"{source['source']} ({split})")
            for split, found in encoded.items()
        }
        unknown = {split: encoded[split].unknown_description() for split in SPLITS}
        details = {**details, f"unknown_{self.noun}s": unknown}
        super().__init__(
            encoder=encoder, examples=blocks, max_length=seq_len, source=source, details=details
        )

    def _encode(self, encoder: TextEncoder, text: str) -> Encoded:
        return encoder.encode([text])

    def _cut(
        self, encoder: TextEncoder, encoded: Encoded, *, seq_len: int, where: str
    ) -> BlockDataset:
        """Return the examples of a split."""
        from wellposed.tasks.batches.blocks import BlockDataset

        del encoder
        return BlockDataset(
            encoded.ids.flat, seq_len=seq_len, where=where, token_bytes=encoded.token_bytes
        )

    def lengths(self, split: Split) -> Sequence[int]:
        from wellposed.tasks.batches.blocks import BlockLengths

        return BlockLengths(self._examples[split])

    def batches(self, split: Split, batch_size: int, *, seed: int, epoch: int) -> list[list[int]]:
        blocks, key = self._examples[split], shuffle_key(split, seed, epoch)
        offset = (
            random.Random(f"offset/{key}").randrange(blocks.num_offsets) if split == "train" else 0
        )
        return bucketed_batches(
            self.lengths(split), batch_size, shuffle=key, indices=blocks.indices(offset)
        )

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        from wellposed.tasks.batches.collate import collate_causal_lm

        return collate_causal_lm(examples, pad_id=self._encoder.pad_id)

    def metric_sums(
        self, logits: Tensor, batch: Mapping[str, Tensor]
    ) -> dict[str, tuple[float, float]]:
        total, count = self.loss_sum(logits.detach(), batch)
        return {self.nats_name: (float(total), float(count))}

    def summarize(self, totals: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        total, count = totals[self.nats_name]
        return self._metrics(total / count)

    def reference(self) -> dict[str, float]:
        from wellposed.tasks.kinds.objectives import frequency_entropy

        return self._metrics(frequency_entropy(self._examples["valid"].tokens[1:]))

    @abstractmethod
    def _metrics(self, nats: float) -> dict[str, float]:
        """Return the metrics of a mean of -ln p."""

    def _describe_examples(self) -> dict[str, Any]:
        return {
            "seq_len": self._max_length,
            "blocks": {split: len(blocks) for split, blocks in self._examples.items()},
            "predicted": (
                f"every {self.noun} of a split but its first, once; context restarts at every block"
            ),
        }
