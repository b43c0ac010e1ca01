"""Task ``text_classification``: one label per text, from csv, tsv or jsonl files; accuracy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from wellposed.errors import DataError
from wellposed.options import CheckedOptions, Size
from wellposed.tasks.data.docstrings import labelled_docstrings
from wellposed.tasks.data.labelled import (
    AUTO,
    LabelledTexts,
    TableOptions,
    load_labelled,
    name_classes,
    sorted_labels,
)
from wellposed.tasks.data.splits import (
    MIN_ROWS_TO_CUT,
    SPLITS,
    Split,
    cut_missing,
    refuse_split_files,
)
from wellposed.tasks.kinds.classification import (
    ClassificationTask,
    LabelledExamples,
    encode_labelled,
    number_labels,
)
from wellposed.tasks.task import register_task
from wellposed.tasks.text import build_encoder


@dataclass(frozen=True)
class TextClassificationOptions(CheckedOptions):
    """Options of the task `text_classification`."""

    data: str
    """A csv, tsv, jsonl, json or parquet file, a folder with a train file or train/CLASS/*.txt, hf:name[:config];
    or builtin: sentences about code or networks that ship with Python."""
    valid: str | None = None
    """File of the valid split; found beside the train file, or cut from it, where not given."""
    test: str | None = None
    """File of the test split; found beside the train file, or cut from it, where not given."""
    label_column: str = AUTO
    """Name of the label column, or its number from 0 without a header."""
    text_column: str = AUTO
    """Name or number of the text column; several between commas are joined (two: a pair, for hf:)."""
    class_names: str = AUTO
    """Names of the labels in their order, between commas; auto reads classes.txt beside the train file."""
    header: Literal["auto", "yes", "no"] = "auto"
    """Whether the first line names the columns; auto looks for the names of a label and of a text column."""
    quoting: Literal["auto", "csv", "none"] = "auto"
    """Whether fields are quoted: auto is csv for .csv, none for .tsv."""
    tokenizer: str = "word"
    """byte, character, word (between white space) or hf:NAME_OR_PATH."""
    max_words: Size = 20000
    """Words in the vocabulary of the word tokenizer, the most frequent of train; others become the unknown token."""
    max_length: Size = 256
    """Most tokens of a text."""
    overflow: Literal["truncate", "error"] = "truncate"
    """A longer text keeps its first max_length tokens (counted in the report), or is an error."""


class TextClassificationTask(ClassificationTask):
    """Classification of texts by the labels that train holds; a label of valid or test that train
    lacks is an error.

    For a Hugging Face tokenizer two text columns are one pair, in the tokenizer's own form and with
    its token types; for the others they are joined by a space. The description says which.

    Texts longer than ``max_length`` are cut or refused as ``overflow`` says; words or characters
    that train lacks become the unknown token; both are counted in the description, as are texts of
    valid and test that train holds verbatim.
    """

    name: ClassVar[str] = "text_classification"

    def __init__(self, options: TextClassificationOptions) -> None:
        self.options = options
        table = TableOptions(
            options.label_column,
            options.text_column,
            options.header,
            options.quoting,
            pairs=options.tokenizer.startswith("hf:"),
        )
        tables, source = _read(options, table)
        labels = sorted_labels(tables["train"].labels)
        _refuse_labels(tables["train"], labels)
        names, named_by = name_classes(labels, tables["train"].path, options.class_names)
        numbers = {split: number_labels(tables[split], labels, split) for split in SPLITS}
        encoder = build_encoder(
            options.tokenizer, tables["train"].texts, max_words=options.max_words
        )
        encoded, details = encode_labelled(encoder, tables, options, noun="texts")
        super().__init__(
            encoder=encoder,
            examples={
                split: LabelledExamples(encoded[split].ids, numbers[split], encoded[split].segments)
                for split in SPLITS
            },
            labels=names,
            max_length=options.max_length,
            source=source | named_by,
            details=details,
        )


def _read(
    options: TextClassificationOptions, table: TableOptions
) -> tuple[dict[Split, LabelledTexts], dict[str, Any]]:
    if options.data != "builtin":
        return load_labelled(options.data, valid=options.valid, test=options.test, table=table)
    refuse_split_files("the builtin sentences", valid=options.valid, test=options.test)
    sentences, described = labelled_docstrings()
    tables, cut = cut_missing({"train": sentences}, "builtin", share=0.15)
    return tables, described | cut


def _refuse_labels(train: LabelledTexts, labels: list[str]) -> None:
    rows = len(train.labels)
    if len(labels) < 2:
        raise DataError(
            f"{train.path}: every row has the label {labels[0]!r}, expected two labels or more"
        )
    if rows >= MIN_ROWS_TO_CUT and 2 * len(labels) > rows:
        raise DataError(
            f"{train.path}: {len(labels)} different labels in {rows} rows ({train.columns}): this"
            f" is not the label column; {train.advice}"
        )


register_task(
    TextClassificationTask,
    TextClassificationOptions,
    "classify texts of a csv, tsv or jsonl file (accuracy)",
)
