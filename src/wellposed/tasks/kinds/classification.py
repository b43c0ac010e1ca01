"""What the classification tasks share: token ids with one label each, accuracy, majority-class
reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from wellposed.tasks.batches.batching import bucketed_batches, shuffle_key
from wellposed.tasks.batches.rows import Rows
from wellposed.tasks.kinds.labels import LabelTask
from wellposed.tasks.kinds.token_task import Encoder, TokenTask
from wellposed.tasks.task import SPLITS, Example, Kind, Split

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from wellposed.tasks.batches.ragged import Ragged


@dataclass(frozen=True)
class LabelledExamples(Rows[Example]):
    """Rows of token ids, each with the number of its label."""

    ids: Ragged
    labels: NDArray[np.integer]
    segments: Ragged | None = None
    """Which text of a pair each token is of, where rows are pairs in one sequence."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row."""
        return self.ids.lengths

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.ids.lengths.max())

    def __len__(self) -> int:
        return len(self.labels)

    def _row(self, index: int) -> Example:
        row = {"input_ids": self.ids[index].tolist(), "labels": [int(self.labels[index])]}
        return (
            row
            if self.segments is None
            else {**row, "token_type_ids": self.segments[index].tolist()}
        )


@dataclass(frozen=True)
class LabelledPairs(Rows[Example]):
    """Row i is documents ``first[i]`` and ``second[i]`` with ``labels[i]``; a document is stored
    once."""

    documents: Ragged
    first: NDArray[np.integer]
    second: NDArray[np.integer]
    labels: NDArray[np.integer]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, both documents together."""
        return self.documents.lengths[self.first] + self.documents.lengths[self.second]

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int(self.documents.lengths.max())

    def __len__(self) -> int:
        return len(self.labels)

    def _row(self, index: int) -> Example:
        return {
            "input_ids": self.documents[int(self.first[index])].tolist(),
            "input_ids_pair": self.documents[int(self.second[index])].tolist(),
            "labels": [int(self.labels[index])],
        }


class ClassificationTask(TokenTask[LabelledExamples | LabelledPairs], LabelTask):
    """Classification of token sequences, or of pairs of them; a subclass says where the examples
    come from.

    ``accuracy`` is the share of rows whose largest logit is on the label. The reference is the
    share of the most frequent label of valid, which no constant answer beats.
    """

    kind: ClassVar[Kind] = "sequence_classification"

    def __init__(
        self,
        *,
        encoder: Encoder,
        examples: Mapping[Split, LabelledExamples | LabelledPairs],
        labels: Sequence[str],
        source: Mapping[str, Any],
        details: Mapping[str, Any],
        max_length: int | None = None,
    ) -> None:
        longest = max_length or max(examples[split].longest for split in SPLITS)
        super().__init__(
            encoder=encoder, examples=examples, max_length=longest, source=source, details=details
        )
        self.labels = tuple(labels)
        self._lengths = {split: examples[split].lengths.tolist() for split in SPLITS}

    def model_kwargs(self) -> dict[str, Any]:
        return {**TokenTask.model_kwargs(self), **LabelTask.model_kwargs(self)}

    def split_labels(self, split: Split) -> NDArray[np.integer]:
        return self._examples[split].labels

    def lengths(self, split: Split) -> Sequence[int]:
        return self._lengths[split]

    def batches(self, split: Split, batch_size: int, *, seed: int, epoch: int) -> list[list[int]]:
        return bucketed_batches(
            self._lengths[split], batch_size, shuffle=shuffle_key(split, seed, epoch)
        )

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        from wellposed.tasks.batches.collate import collate_classification

        return collate_classification(examples, pad_id=self._encoder.pad_id)

    def _describe_examples(self) -> dict[str, Any]:
        per_split: dict[str, Any] = {"examples": {}, "tokens": {}, "longest": {}, "labels": {}}
        for split, examples in self._examples.items():
            per_split["examples"][split] = len(examples)
            per_split["tokens"][split] = int(examples.lengths.sum())
            per_split["longest"][split] = examples.longest
            per_split["labels"][split] = self.label_counts(split)
        return per_split
