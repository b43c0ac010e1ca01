"""Base classes of classification: accuracy, the majority-class baseline, labelled token ids."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from wellposed.lazy import ModuleOnFirstUse
from wellposed_lab.tasks import batches
from wellposed_lab.tasks.batches import Example, Ragged
from wellposed_lab.tasks.data.files import refuse
from wellposed_lab.tasks.data.labelled import LabelledTexts
from wellposed_lab.tasks.data.splits import SPLITS, Split
from wellposed_lab.tasks.task import Batch, Kind, Sums, Task, TokenTask, accuracy_sums
from wellposed_lab.tasks.text.tokenizers import Encoded, TextEncoder, build_encoder, lacks_blanks
from wellposed_lab.tasks.text.windows import WindowEncoder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor
else:
    np = ModuleOnFirstUse("numpy")


@dataclass(frozen=True)
class LabelledExamples(batches.Rows[Example]):
    """Rows of token ids, each with the number of its label."""

    ids: Ragged
    labels: NDArray[np.integer]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.ids.lengths

    @property
    def longest(self) -> int:
        return int(self.ids.lengths.max())

    def __len__(self) -> int:
        return len(self.labels)

    def _row(self, index: int) -> Example:
        return {"input_ids": self.ids[index].tolist(), "labels": [int(self.labels[index])]}


class LabelTask(Task):
    """A task with one label per example. ``accuracy`` counts largest logits that are on the label.
    The reference is the frequency of valid's most frequent label, the best constant answer."""

    headline: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    labels: tuple[str, ...]
    """Names of the labels."""

    @abstractmethod
    def split_labels(self, split: Split) -> NDArray[np.integer]:
        """Return the label number of every example of a split."""

    def model_kwargs(self) -> dict[str, Any]:
        return {
            "num_labels": len(self.labels),
            "id2label": dict(enumerate(self.labels)),
            "label2id": {label: index for index, label in enumerate(self.labels)},
        }

    def metric_sums(self, logits: Tensor, batch: Batch) -> Sums:
        return {"accuracy": accuracy_sums(logits, batch["labels"])}

    def reference(self) -> dict[str, float]:
        counts = np.bincount(self.split_labels("valid"))
        return {"accuracy": float(counts.max() / counts.sum())}

    def train_reference(self, split: Split) -> dict[str, float]:
        answer = np.bincount(self.split_labels("train")).argmax()
        return {"accuracy": float((self.split_labels(split) == answer).mean())}

    def label_counts(self, split: Split) -> dict[str, int]:
        """Return the number of examples of a split with each label."""
        counts = np.bincount(self.split_labels(split), minlength=len(self.labels))
        return dict(zip(self.labels, counts.tolist(), strict=True))


class ClassificationTask(TokenTask[LabelledExamples], LabelTask):
    """Classification of token sequences or pairs; a subclass loads the examples. ``max_length`` is
    by default the length of the longest example."""

    kind: ClassVar[Kind] = "sequence_classification"

    def __init__(
        self,
        *,
        examples: Mapping[Split, LabelledExamples],
        labels: Sequence[str],
        max_length: int | None = None,
        **parts: Any,
    ) -> None:
        longest = max_length or max(examples[split].longest for split in SPLITS)
        super().__init__(examples=examples, max_length=longest, **parts)
        self.labels = tuple(labels)

    def model_kwargs(self) -> dict[str, Any]:
        encoder = self._encoder
        windows = isinstance(encoder, WindowEncoder)
        read = {"max_position_embeddings": encoder.longest} if windows else {}
        return {**TokenTask.model_kwargs(self), **LabelTask.model_kwargs(self), **read}

    @property
    def windows(self) -> dict[str, Any] | None:
        """Options of the windows of words that a model reads; None if it reads texts whole."""
        encoder = self._encoder
        return encoder.windows if isinstance(encoder, WindowEncoder) else None

    def split_labels(self, split: Split) -> NDArray[np.integer]:
        return self._examples[split].labels

    def lengths(self, split: Split) -> Sequence[int]:
        return self._examples[split].lengths.tolist()

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        batch = batches.pad_examples(examples, pad_id=self._encoder.pad_id)
        return {**batch, "labels": batch["labels"][:, 0]}

    def _describe_examples(self) -> dict[str, Any]:
        splits = self._examples
        return {
            "examples": {split: len(examples) for split, examples in splits.items()},
            "tokens": {split: int(examples.lengths.sum()) for split, examples in splits.items()},
            "longest": {split: examples.longest for split, examples in splits.items()},
            "labels": {split: self.label_counts(split) for split in splits},
        }


def encode_labelled(
    tables: Mapping[Split, LabelledTexts], options: Any, *, noun: str
) -> tuple[TextEncoder, dict[Split, Encoded], dict[str, Any]]:
    """Return the encoder, the ids of every text (cut to ``max_length``, or refused if ``overflow``
    asks for it), and counts of cut, unknown and repeated texts."""
    train = tables["train"].texts
    encoder = build_encoder(options.tokenizer, train, max_words=options.max_words)
    words = getattr(options, "certified_windows", 0)
    if words:
        encoder = WindowEncoder(encoder, words, train, options.max_length)

    ids: dict[Split, Encoded] = {}
    for split, table in tables.items():
        ids[split] = encoder.encode(table.texts, max_length=options.max_length)
        lengths = ids[split].full_lengths
        _refuse_rows(
            table,
            {i: "the text is empty" for i, length in enumerate(lengths) if length == 0},
            "rows without a token cannot be classified; correct or remove them",
        )
        if options.overflow == "error":
            remedy = "raise max_length, or give overflow='truncate' to keep the first tokens"
            refuse_longer(table, lengths, options.max_length, remedy)

    train_texts = set(train)
    limit = options.max_length
    cut = {s: sum(size > limit for size in encoded.full_lengths) for s, encoded in ids.items()}
    again = {split: sum(map(train_texts.__contains__, tables[split].texts)) for split in SPLITS[1:]}
    by_words = options.tokenizer == "word" or isinstance(encoder, WindowEncoder)
    unspaced = {s: sum(map(lacks_blanks, t.texts)) for s, t in tables.items()} if by_words else {}
    details = {
        "max_length": limit,
        "overflow": options.overflow,
        f"truncated_{noun}": cut,
        "unknown_pieces": {split: encoded.unknown_description() for split, encoded in ids.items()},
        f"{noun}_also_in_train": again,
        "texts_without_blanks": unspaced,
    }

    return encoder, ids, details


def refuse_longer(table: LabelledTexts, lengths: Sequence[int], limit: int, remedy: str) -> None:
    """Raise `DataError` with every row of more than ``limit`` tokens."""
    longer = {i: f"{length} tokens" for i, length in enumerate(lengths) if length > limit}
    _refuse_rows(table, longer, f"rows with more than max_length = {limit} tokens; {remedy}")


def _refuse_rows(table: LabelledTexts, problems: Mapping[int, str], why: str) -> None:
    refuse(why, [f"{table.where(row)}: {problem}" for row, problem in problems.items()])


def number_labels(table: LabelledTexts, labels: Sequence[str], split: str) -> NDArray[np.integer]:
    """Return each row's index into ``known``, or raise with every row of another label."""
    index = {label: number for number, label in enumerate(labels)}
    foreign = {i: f"label {name!r}" for i, name in enumerate(table.labels) if name not in index}
    _refuse_rows(
        table,
        foreign,
        f"{split} has labels that train does not have; known: {', '.join(map(repr, labels))};"
        " correct the rows, or give another train file",
    )
    return np.array([index[label] for label in table.labels], dtype=np.int64)
