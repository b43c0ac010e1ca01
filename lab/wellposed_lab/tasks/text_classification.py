"""Task ``text_classification``: one label per text, from csv, tsv or jsonl files; accuracy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wellposed.errors import ConfigError, DataError
from wellposed.options import Count, Size
from wellposed_lab.tasks.data import labelled, splits
from wellposed_lab.tasks.data.splits import SPLITS, DataOptions, Split
from wellposed_lab.tasks.data.texts import labelled_docstrings
from wellposed_lab.tasks.kinds import classification
from wellposed_lab.tasks.task import register_task

_ADVICE = "name the columns in a first line, or the label with label_column=NAME"


@dataclass(frozen=True)
class TextClassificationOptions(labelled.TableOptions, DataOptions):
    """Options of the task `text_classification`."""

    data: str
    """A csv, tsv, jsonl or parquet file, a folder with a train file, hf:name[:config], or builtin
    (sentences about code or networks that ship with Python)."""
    tokenizer: str = "word"
    """byte, character, word (between white space) or hf:NAME_OR_PATH."""
    max_words: Size = 20000
    """Words of the word tokenizer, the most frequent of train; others become the unknown token."""
    limit_train: Size | None = None
    """Read only the first texts of train (default: all)."""
    max_length: Size = 256
    """Most tokens of a text."""
    certified_windows: Count = 0
    """Read windows of this many words one by one and answer by mean vote: certified in words for
    any model (`certify RUN --words`); max_length then counts words. 0: read whole texts."""
    overflow: Literal["truncate", "error"] = "truncate"
    """truncate longer texts to max_length tokens (counted in the report), or raise an error."""


@register_task(
    "text_classification",
    TextClassificationOptions,
    "classify texts of a csv, tsv or jsonl file (accuracy)",
)
class TextClassificationTask(classification.ClassificationTask):
    """Classification of texts by the labels of train; another label in valid or test is an error.

    Several text columns are joined by a space. Longer texts than ``max_length`` are cut or refused
    by ``overflow``; unknown words or characters become the unknown token. The description counts
    both, and texts of valid and test that are also in train.
    """

    def __init__(self, options: TextClassificationOptions) -> None:
        self.options = options
        is_pair = options.text_column.count(",") == 1 and not options.certified_windows
        if options.tokenizer.startswith("hf:") and is_pair:
            raise ConfigError(
                f"text_column = {options.text_column!r}: pairs of texts are no longer supported; join"
                " the two columns into one in the file"
            )

        if options.data == "builtin":
            table, source = labelled_docstrings()
            tables, source = splits.cut_missing({"train": table}, "builtin", source, share=0.15)
        else:
            tables, source = labelled.load_labelled(options, options)

        train = tables["train"]
        limit = options.limit_train
        if limit is not None:
            source["train_texts_left_out_by_limit_train"] = max(0, len(train) - limit)
            tables["train"] = train = train.select(range(min(len(train), limit)))

        labels = labelled.sorted_labels(train.labels)
        _refuse_labels(train, labels)
        numbers = {s: classification.number_labels(tables[s], labels, s) for s in SPLITS}
        encoder, encoded, details = classification.encode_labelled(tables, options, noun="texts")
        examples: dict[Split, classification.LabelledExamples] = {
            split: classification.LabelledExamples(ids.ids, numbers[split])
            for split, ids in encoded.items()
        }
        super().__init__(
            encoder=encoder,
            examples=examples,
            labels=labels,
            max_length=options.max_length,
            described={**source, **details},
        )


def _refuse_labels(train: labelled.LabelledTexts, labels: list[str]) -> None:
    rows = len(train.labels)
    if len(labels) < 2:
        problem = f"{train.path}: every row has label {labels[0]!r}, expected two or more"
        raise DataError(f"{problem}; {_ADVICE}")
    if rows >= splits.MIN_ROWS_TO_CUT and 2 * len(labels) > rows:
        raise DataError(
            f"{train.path}: {len(labels)} different labels in {rows} rows ({train.columns}): this"
            f" is not the label column; {_ADVICE}"
        )
