"""What the classification tasks share: token ids with one label each, accuracy, majority-class reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from wellposed.errors import ConfigError, DataError, listed
from wellposed.tasks.batches.batching import bucketed_batches, shuffle_key
from wellposed.tasks.batches.rows import Rows
from wellposed.tasks.data.tables import LabelledTexts
from wellposed.tasks.task import SPLITS, Example, Kind, Split, Task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from wellposed.tasks.batches.pair_collate import PairExamples
    from wellposed.tasks.batches.ragged import Ragged
    from wellposed.tasks.text.tokenizers import TextEncoder

MIN_ROWS_TO_CUT = 20
CUT_SHARE = 0.05


@dataclass(frozen=True)
class LabelledExamples(Rows[Example]):
    """Rows of token ids, each with the number of its label."""

    ids: Ragged
    labels: NDArray[np.integer]

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
        return {"input_ids": self.ids[index].tolist(), "labels": [int(self.labels[index])]}


class ClassificationTask(Task):
    """Classification of token sequences; a subclass says where the examples come from.

    ``accuracy`` is the share of rows whose largest logit is on the label. The reference is the share of the most
    frequent label of valid, which no constant answer beats.
    """

    kind: ClassVar[Kind] = "sequence_classification"
    headline: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True

    def __init__(
        self,
        *,
        encoder: TextEncoder,
        examples: Mapping[Split, LabelledExamples | PairExamples],
        labels: Sequence[str],
        max_length: int | None = None,
    ) -> None:
        longest = max(examples[split].longest for split in SPLITS)
        self.labels = tuple(labels)
        self._encoder = encoder
        self._examples = dict(examples)
        self._max_length = max_length or longest
        self._lengths = {split: examples[split].lengths.tolist() for split in SPLITS}

    def _build_tokenizer(self) -> PreTrainedTokenizerFast:
        return self._encoder.tokenizer(max_length=self._max_length)

    def model_kwargs(self) -> dict[str, Any]:
        return {
            "vocab_size": self._encoder.vocab_size,
            "max_position_embeddings": self._max_length,
            "pad_token_id": self._encoder.pad_id,
            "bos_token_id": self._encoder.bos_id,
            "eos_token_id": self._encoder.eos_id,
            "num_labels": len(self.labels),
            "id2label": dict(enumerate(self.labels)),
            "label2id": {label: index for index, label in enumerate(self.labels)},
        }

    def dataset(self, split: Split) -> LabelledExamples | PairExamples:
        return self._examples[split]

    def lengths(self, split: Split) -> Sequence[int]:
        return self._lengths[split]

    def batches(self, split: Split, batch_size: int, *, seed: int, epoch: int) -> list[list[int]]:
        return bucketed_batches(self._lengths[split], batch_size, shuffle=shuffle_key(split, seed, epoch))

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        from wellposed.tasks.batches.collate import collate_classification

        return collate_classification(examples, pad_id=self._encoder.pad_id)

    def loss_sum(
        self, logits: Tensor, batch: Mapping[str, Tensor], *, label_smoothing: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        from wellposed.tasks.kinds.objectives import cross_entropy_sum

        return cross_entropy_sum(logits, batch["labels"], label_smoothing=label_smoothing)

    def metric_sums(self, logits: Tensor, batch: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
        from wellposed.tasks.kinds.objectives import accuracy_sums

        return {"accuracy": accuracy_sums(logits, batch["labels"])}

    def summarize(self, totals: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        correct, count = totals["accuracy"]
        return {"accuracy": correct / count}

    def reference(self) -> dict[str, float]:
        """Return the share of valid's most frequent label."""
        import numpy as np

        counts = np.bincount(self._examples["valid"].labels)
        return {"accuracy": float(counts.max() / counts.sum())}

    def _describe_examples(self) -> dict[str, Any]:
        """Return sizes, lengths and labels per split, for `description`."""
        import numpy as np

        described: dict[str, Any] = {"examples": {}, "tokens": {}, "longest": {}, "labels": {}}
        for split, examples in self._examples.items():
            counts = np.bincount(examples.labels, minlength=len(self.labels))
            described["examples"][split] = len(examples)
            described["tokens"][split] = int(examples.lengths.sum())
            described["longest"][split] = examples.longest
            described["labels"][split] = dict(zip(self.labels, counts.tolist(), strict=True))
        return described


def cut_missing_splits(tables: dict[Split, LabelledTexts]) -> tuple[dict[Split, LabelledTexts], dict[str, str]]:
    """Cut the splits without a table from train: 5 % each, rows drawn by a fixed shuffle; return what was cut."""
    if all(split in tables for split in SPLITS):
        return tables, {}
    train = tables["train"]
    rows, described = cut_rows(len(train.texts), [split for split in SPLITS if split not in tables], train.path)
    tables = dict(tables)
    for split, chosen in rows.items():
        tables[split] = train.select(chosen)
    return tables, described


def cut_rows(
    total: int, missing: Sequence[Split], where: str, *, share: float = CUT_SHARE
) -> tuple[dict[Split, list[int]], dict[str, str]]:
    """Return the rows of train and of each missing split, ``share`` each by a fixed shuffle, and what was cut.

    >>> rows, cut = cut_rows(20, ["test"], "x.tsv")
    >>> len(rows["train"]), rows["test"], cut
    (19, [15], {'test': '1 of 20 rows, by a fixed shuffle'})
    """
    import random

    if total < MIN_ROWS_TO_CUT:
        raise DataError(
            f"{where}: {total} rows are too few to cut {' and '.join(missing)} from, expected at least "
            f"{MIN_ROWS_TO_CUT}; give them with the options {' and '.join(missing)}"
        )
    order = list(range(total))
    random.Random("cut").shuffle(order)
    count = max(1, round(total * share))
    rows: dict[Split, list[int]] = {}
    for split in missing:
        rows[split] = sorted(order[:count])
        order = order[count:]
    rows["train"] = sorted(order)
    return rows, dict.fromkeys(missing, f"{count} of {total} rows, by a fixed shuffle")


def sorted_labels(labels: Sequence[str]) -> list[str]:
    """Return the distinct labels, as numbers in order if all are whole numbers."""
    distinct = set(labels)
    if all(label.removeprefix("-").isascii() and label.removeprefix("-").isdigit() for label in distinct):
        return sorted(distinct, key=lambda label: (int(label), label))
    return sorted(distinct)


def number_labels(table: LabelledTexts, known: Sequence[str], split: str) -> NDArray[np.integer]:
    """Return each row's index into ``known``, or raise naming every row whose label is not there."""
    import numpy as np

    index = {label: number for number, label in enumerate(known)}
    problems = [f"{table.where(i)}: label {label!r}" for i, label in enumerate(table.labels) if label not in index]
    if problems:
        raise DataError(
            f"{split} has labels that train does not have; known: {', '.join(map(repr, known))}; "
            "correct the rows, or give another train file:\n" + listed(problems)
        )
    return np.array([index[label] for label in table.labels], dtype=np.int64)


def refuse_empty(table: LabelledTexts, lengths: Sequence[int]) -> None:
    """Raise `DataError` naming every row without a token."""
    problems = [f"{table.where(i)}: the text is empty" for i, length in enumerate(lengths) if length == 0]
    if problems:
        raise DataError("rows without a token cannot be classified; correct or remove them:\n" + listed(problems))


def refuse_longer(table: LabelledTexts, lengths: Sequence[int], max_length: int, remedy: str) -> None:
    """Raise `DataError` naming every row with more than ``max_length`` tokens."""
    problems = [
        f"{table.where(i)}: {length} tokens" for i, length in enumerate(lengths) if length > max_length
    ]  # fmt: skip
    if problems:
        raise DataError(f"rows with more than max_length = {max_length} tokens; {remedy}:\n" + listed(problems))


def require_positive(where: str, **values: int | None) -> None:
    """Raise `ConfigError` naming every given value below 1."""
    wrong = [f"{name} = {value}" for name, value in values.items() if value is not None and value < 1]
    if wrong:
        raise ConfigError(f"{where}: {', '.join(wrong)}; expected at least 1")
