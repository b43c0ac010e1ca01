"""Task ``text_classification``: one label per text, from csv, tsv or jsonl files; accuracy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from wellposed.errors import ConfigError, DataError
from wellposed.tasks.data.class_names import name_classes
from wellposed.tasks.data.columns import AUTO, TableOptions
from wellposed.tasks.data.tables import SUFFIXES, LabelledTexts, read_table, table_from_hub
from wellposed.tasks.data.text_folders import has_class_folders, read_text_folders
from wellposed.tasks.kinds.classification import (
    MIN_ROWS_TO_CUT,
    ClassificationTask,
    LabelledExamples,
    cut_missing_splits,
    number_labels,
    refuse_empty,
    refuse_longer,
    require_positive,
    sorted_labels,
)
from wellposed.tasks.task import SPLITS, TASKS, Split, TaskSpec


@dataclass(frozen=True)
class TextClassificationOptions:
    """Options of the task `text_classification`."""

    data: str
    """A csv, tsv or jsonl file (.gz too), a folder with a train file or with train/CLASS/*.txt, or hf:name[:config]."""
    valid: str | None = None
    """File of the valid split; found beside the train file, or cut from it, where not given."""
    test: str | None = None
    """File of the test split; found beside the train file, or cut from it, where not given."""
    label_column: str = AUTO
    """Name of the label column, or its number from 0 in a file without a header."""
    text_column: str = AUTO
    """Name of the text column, or its number from 0 in a file without a header; several, between commas, are joined."""
    class_names: str = AUTO
    """Names of the labels in their order, between commas; auto reads classes.txt beside the train file."""
    header: Literal["auto", "yes", "no"] = "auto"
    """Whether the first line names the columns; auto looks for the names of a label and of a text column."""
    quoting: Literal["auto", "csv", "none"] = "auto"
    """Whether fields are quoted: auto is csv for .csv, none for .tsv."""
    tokenizer: str = "word"
    """byte, character, word (between white space) or hf:NAME_OR_PATH."""
    max_words: int = 20000
    """Words in the vocabulary of the word tokenizer, the most frequent of train; others become the unknown token."""
    max_length: int = 256
    """Most tokens of a text."""
    overflow: Literal["truncate", "error"] = "truncate"
    """A longer text keeps its first max_length tokens (counted in the report), or is an error."""


class TextClassificationTask(ClassificationTask):
    """Classification of texts by the labels that train holds; a label of valid or test that train lacks is an error.

    Texts longer than ``max_length`` are cut or refused as ``overflow`` says; words or characters that train lacks
    become the unknown token; both are counted in the description, as are texts of valid and test that train holds
    verbatim.
    """

    name: ClassVar[str] = "text_classification"

    def __init__(self, options: TextClassificationOptions) -> None:
        from wellposed.tasks.text.tokenizers import build_encoder

        require_positive("text_classification", max_length=options.max_length, max_words=options.max_words)
        tables, self._source = load_tables(options, _table_options(options))
        labels = sorted_labels(tables["train"].labels)
        _refuse_labels(tables["train"], labels)
        names, named_by = name_classes(labels, tables["train"].path, options.class_names)
        self._source |= named_by
        numbers = {split: number_labels(tables[split], labels, split) for split in SPLITS}
        encoder = build_encoder(options.tokenizer, tables["train"].texts, max_words=options.max_words)
        examples: dict[Split, LabelledExamples] = {}
        self._truncated, self._unknown = {}, {}
        for split in SPLITS:
            table = tables[split]
            encoded = encoder.encode(table.texts, max_length=options.max_length)
            refuse_empty(table, encoded.full_lengths)
            if options.overflow == "error":
                remedy = "raise max_length, or give overflow='truncate' to keep the first tokens"
                refuse_longer(table, encoded.full_lengths, options.max_length, remedy)
            self._truncated[split] = sum(length > options.max_length for length in encoded.full_lengths)
            self._unknown[split] = encoded.unknown_description()
            examples[split] = LabelledExamples(encoded.ids, numbers[split])
        seen = set(tables["train"].texts)
        self._repeated = {split: sum(text in seen for text in tables[split].texts) for split in SPLITS[1:]}
        self.options = options
        super().__init__(encoder=encoder, examples=examples, labels=names, max_length=options.max_length)

    def description(self) -> dict[str, Any]:
        return {
            "task": self.name,
            **self._source,
            "tokenizer": self._encoder.description(),
            **self._describe_examples(),
            "max_length": self.options.max_length,
            "overflow": self.options.overflow,
            "truncated_texts": self._truncated,
            "unknown_pieces": self._unknown,
            "texts_also_in_train": self._repeated,
        }


def _refuse_labels(train: LabelledTexts, labels: list[str]) -> None:
    rows = len(train.labels)
    if len(labels) < 2:
        raise DataError(f"{train.path}: every row has the label {labels[0]!r}, expected two labels or more")
    if rows >= MIN_ROWS_TO_CUT and 2 * len(labels) > rows:
        raise DataError(
            f"{train.path}: {len(labels)} different labels in {rows} rows ({train.columns}): this is not the label "
            "column; name it with label_column=NAME, or give its number from 0"
        )


def _table_options(options: TextClassificationOptions) -> TableOptions:
    return TableOptions(options.label_column, options.text_column, options.header, options.quoting)


def load_tables(options: Any, table_options: TableOptions) -> tuple[dict[Split, LabelledTexts], dict[str, Any]]:
    """Read the tables of the splits, cutting those that are missing from train, and describe where they came from.

    Args:
        options: has ``data``, ``valid`` and ``test``.
        table_options: how the files are read.
    """
    from wellposed.tasks.data.files import find_split_files, load_hub_dataset, read_text

    tables: dict[Split, LabelledTexts] = {}
    files: dict[str, Any] = {}
    if options.data == "builtin":
        raise ConfigError("data = 'builtin': this task has no built-in data; give a file, a folder or hf:name[:config]")
    if options.data.startswith("hf:"):
        _refuse_files(options, "hf: data sets bring their own splits")
        how = "published"
        for split, rows in load_hub_dataset(options.data).items():
            tables[split] = table_from_hub(rows, f"{options.data} ({split})", table_options)
            files[split] = {"rows": len(rows), "fingerprint": getattr(rows, "_fingerprint", None)}
    elif has_class_folders(options.data):
        _refuse_files(options, "folders of texts by class bring their own splits")
        tables, described = read_text_folders(options.data)
        tables, cut = cut_missing_splits(tables)
        return tables, {"source": options.data, **described, **({"cut_from_train": cut} if cut else {})}
    else:
        found = find_split_files(options.data, valid=options.valid, test=options.test, suffixes=SUFFIXES)
        how = found.how
        for split, path in found.paths.items():
            file = read_text(path)
            tables[split] = read_table(file, table_options)
            files[split] = file.description() | {"columns": tables[split].columns}
    tables, cut = cut_missing_splits(tables)
    described = {"source": options.data, "files": files, "splits": how}
    return tables, described | ({"cut_from_train": cut} if cut else {})


def _refuse_files(options: Any, reason: str) -> None:
    given = [name for name in ("valid", "test") if getattr(options, name) is not None]
    if given:
        raise ConfigError(f"option {' and '.join(given)} needs data=FILE; {reason}")


TASKS.register("text_classification")(
    TaskSpec(
        "text_classification",
        TextClassificationOptions,
        TextClassificationTask,
        "classify texts of a csv, tsv or jsonl file (accuracy)",
    )
)
