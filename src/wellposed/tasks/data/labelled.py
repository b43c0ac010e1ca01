"""Labelled texts of every split, from tables, folders by class or the hub, and their token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from wellposed.errors import ConfigError, DataError, listed
from wellposed.tasks.data.columns import TableOptions
from wellposed.tasks.data.files import describe_file, read_text
from wellposed.tasks.data.splits import cut_missing, load_splits, refuse_split_files
from wellposed.tasks.data.tables import (
    SUFFIXES,
    LabelledTexts,
    read_parquet,
    read_table,
    table_from_hub,
)
from wellposed.tasks.data.text_folders import has_class_folders, read_text_folders
from wellposed.tasks.task import SPLITS, Split

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from wellposed.tasks.text.tokenizers import Encoded, TextEncoder


class TextOptions(Protocol):
    """The options of a task that say how many tokens of a text are kept."""

    @property
    def max_length(self) -> int: ...
    @property
    def overflow(self) -> str: ...


def load_labelled(
    data: str, *, valid: str | None, test: str | None, table: TableOptions | None = None
) -> tuple[dict[Split, LabelledTexts], dict[str, Any]]:
    """Read the labelled texts of the splits, cut missing ones from train, and describe where they
    came from."""
    table_options = table or TableOptions()

    def read_file(path: Path) -> tuple[LabelledTexts, dict[str, Any]]:
        if path.suffix == ".parquet":
            read = read_parquet(path, table_options)
            return read, describe_file(path) | {"columns": read.columns}
        file = read_text(path)
        read = read_table(file, table_options)
        return read, file.description() | {"columns": read.columns}

    if data == "builtin":
        raise no_builtin_data()
    if not data.startswith("hf:") and has_class_folders(data):
        refuse_split_files(
            "folders of texts by class bring their own splits", valid=valid, test=test
        )
        tables, found = read_text_folders(data)
        described = {"source": data, **found}
    else:
        tables, described = load_splits(
            data,
            valid=valid,
            test=test,
            suffixes=SUFFIXES,
            read_file=read_file,
            read_hub=lambda rows, where: table_from_hub(rows, where, table_options),
        )
    tables, cut = cut_missing(tables, tables["train"].path)
    return tables, described | cut


def no_builtin_data() -> ConfigError:
    """Build the error for ``data='builtin'`` where a task has none."""
    return ConfigError(
        "data = 'builtin': this task has no built-in data; give a file, a folder or"
        " hf:name[:config]"
    )


def encode_labelled(
    encoder: TextEncoder, tables: Mapping[Split, LabelledTexts], options: TextOptions, *, noun: str
) -> tuple[dict[Split, Encoded], dict[str, Any]]:
    """Return the token ids of every text, cut or refused as ``options`` say, and what was cut,
    unknown or repeated."""
    ids: dict[Split, Encoded] = {}
    truncated, unknown = {}, {}
    for split in SPLITS:
        encoded = _encode_table(encoder, tables[split], options.max_length)
        _refuse_empty(tables[split], encoded.full_lengths)
        if options.overflow == "error":
            remedy = "raise max_length, or give overflow='truncate' to keep the first tokens"
            refuse_longer(tables[split], encoded.full_lengths, options.max_length, remedy)
        truncated[split] = sum(length > options.max_length for length in encoded.full_lengths)
        unknown[split] = encoded.unknown_description()
        ids[split] = encoded
    seen = set(tables["train"].texts)
    return ids, {
        "max_length": options.max_length,
        "overflow": options.overflow,
        f"truncated_{noun}": truncated,
        "unknown_pieces": unknown,
        f"{noun}_also_in_train": {
            split: sum(text in seen for text in tables[split].texts) for split in SPLITS[1:]
        },
    }


def _encode_table(encoder: TextEncoder, table: LabelledTexts, max_length: int) -> Encoded:
    from wellposed.tasks.text.pretrained import PretrainedEncoder

    if table.pairs is not None and isinstance(encoder, PretrainedEncoder):
        return encoder.encode_pairs(table.pairs, max_length=max_length)
    return encoder.encode(table.texts, max_length=max_length)


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


def sorted_labels(labels: Sequence[str]) -> list[str]:
    """Return the distinct labels, as numbers in order if all are whole numbers."""
    distinct = set(labels)
    if all(
        label.removeprefix("-").isascii() and label.removeprefix("-").isdigit()
        for label in distinct
    ):
        return sorted(distinct, key=lambda label: (int(label), label))
    return sorted(distinct)


def number_labels(table: LabelledTexts, known: Sequence[str], split: str) -> NDArray[np.integer]:
    """Return each row's index into ``known``, or raise naming every row whose label is not
    there."""
    import numpy as np

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
