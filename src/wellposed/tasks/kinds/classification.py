"""What the classification tasks share: one label an example, accuracy, the majority class as the
reference; texts with labels as token ids."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from wellposed.errors import DataError, listed
from wellposed.tasks.batches import (
    Ragged,
    Rows,
    bucketed_batches,
    collate_classification,
    shuffle_key,
)
from wellposed.tasks.data.labelled import LabelledTexts
from wellposed.tasks.data.splits import SPLITS, Split
from wellposed.tasks.kinds.objectives import accuracy_sums
from wellposed.tasks.task import Encoder, Example, Kind, Task, TokenTask

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from wellposed.tasks.text.tokenizers import Encoded, TextEncoder


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


class LabelTask(Task):
    """A task with one label an example.

    ``accuracy`` is the share of examples whose largest logit is on the label. The reference is the
    share of the most frequent label of valid, which no constant answer beats.
    """

    headline: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    labels: tuple[str, ...]
    """Names of the labels."""

    @abstractmethod
    def split_labels(self, split: Split) -> NDArray[np.integer]:
        """Return the label of every example of a split, by number."""

    def model_kwargs(self) -> dict[str, Any]:
        return {
            "num_labels": len(self.labels),
            "id2label": dict(enumerate(self.labels)),
            "label2id": {label: index for index, label in enumerate(self.labels)},
        }

    def metric_sums(
        self, logits: Tensor, batch: Mapping[str, Tensor]
    ) -> dict[str, tuple[float, float]]:
        return {"accuracy": accuracy_sums(logits, batch["labels"])}

    def summarize(self, totals: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        correct, count = totals["accuracy"]
        return {"accuracy": correct / count}

    def reference(self) -> dict[str, float]:
        """Return the share of valid's most frequent label."""
        counts = np.bincount(self.split_labels("valid"))
        return {"accuracy": float(counts.max() / counts.sum())}

    def label_counts(self, split: Split) -> dict[str, int]:
        """Return how many examples of a split have each label."""
        counts = np.bincount(self.split_labels(split), minlength=len(self.labels))
        return dict(zip(self.labels, counts.tolist(), strict=True))


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
        return collate_classification(examples, pad_id=self._encoder.pad_id)

    def _describe_examples(self) -> dict[str, Any]:
        per_split: dict[str, Any] = {"examples": {}, "tokens": {}, "longest": {}, "labels": {}}
        for split, examples in self._examples.items():
            per_split["examples"][split] = len(examples)
            per_split["tokens"][split] = int(examples.lengths.sum())
            per_split["longest"][split] = examples.longest
            per_split["labels"][split] = self.label_counts(split)
        return per_split


class TextOptions(Protocol):
    """The options of a task that say how many tokens of a text are kept."""

    @property
    def max_length(self) -> int: ...
    @property
    def overflow(self) -> str: ...


def encode_labelled(
    encoder: TextEncoder, tables: Mapping[Split, LabelledTexts], options: TextOptions, *, noun: str
) -> tuple[dict[Split, Encoded], dict[str, Any]]:
    """Return the token ids of every text, cut or refused as ``options`` say, and what was cut,
    unknown or repeated."""
    ids: dict[Split, Encoded] = {}
    for split, table in tables.items():
        ids[split] = encoder.encode_table(table.texts, table.pairs, max_length=options.max_length)
        _refuse_empty(table, ids[split].full_lengths)
        if options.overflow == "error":
            remedy = "raise max_length, or give overflow='truncate' to keep the first tokens"
            refuse_longer(table, ids[split].full_lengths, options.max_length, remedy)
    seen = set(tables["train"].texts)
    return ids, {
        "max_length": options.max_length,
        "overflow": options.overflow,
        f"truncated_{noun}": {
            split: sum(length > options.max_length for length in encoded.full_lengths)
            for split, encoded in ids.items()
        },
        "unknown_pieces": {split: encoded.unknown_description() for split, encoded in ids.items()},
        f"{noun}_also_in_train": {
            split: sum(text in seen for text in tables[split].texts) for split in SPLITS[1:]
        },
    }


def _refuse_empty(table: LabelledTexts, lengths: Sequence[int]) -> None:
    problems = [
        f"{table.where(i)}: the text is empty" for i, length in enumerate(lengths) if length == 0
    ]
    if problems:
        raise DataError(
            "rows without a token cannot be classified; correct or remove them:\n"
            + listed(problems)
        )


def refuse_longer(
    table: LabelledTexts, lengths: Sequence[int], max_length: int, remedy: str
) -> None:
    """Raise `DataError` naming every row with more than ``max_length`` tokens."""
    problems = [
        f"{table.where(i)}: {length} tokens"
        for i, length in enumerate(lengths)
        if length > max_length
    ]
    if problems:
        raise DataError(
            f"rows with more than max_length = {max_length} tokens; {remedy}:\n" + listed(problems)
        )


def number_labels(table: LabelledTexts, known: Sequence[str], split: str) -> NDArray[np.integer]:
    """Return each row's index into ``known``, or raise naming every row whose label is not
    there."""
    index = {label: number for number, label in enumerate(known)}
    problems = [
        f"{table.where(i)}: label {label!r}"
        for i, label in enumerate(table.labels)
        if label not in index
    ]
    if problems:
        raise DataError(
            f"{split} has labels that train does not have; known: {', '.join(map(repr, known))}; "
            "correct the rows, or give another train file:\n" + listed(problems)
        )
    return np.array([index[label] for label in table.labels], dtype=np.int64)
