"""The three sets of the minBERT study: Stanford Sentiment, Quora duplicate questions, STS
benchmark.

Files are tab separated with a header, quoted as CSV, plain or gzip: the names of the CS224N project
(``ids-sst-train.csv``, ``quora-train.csv``, ``sts-dev.csv``) and any with one more part
(``quora-train-15k.csv.gz``). All train files of a set are joined; dev or valid files are the
validation split. Files without labels (``test-student``) are not read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from wellposed.errors import ConfigError, DataError, listed
from wellposed.tasks.data.files import missing_file, read_table
from wellposed.tasks.text.tokenizers import tokenizers_library

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SPLIT_WORDS = {"train": "train", "valid": "(?:dev|valid)"}
Rows: TypeAlias = "list[tuple[tuple[str, ...], float]]"
"""Sentences, one or two to a row, and their label."""


@dataclass(frozen=True)
class SetFormat:
    """How one set is stored: the name its files carry, its columns, and which labels may occur."""

    stem: str
    sentences: tuple[str, ...]
    label: str
    highest: int
    whole: bool
    """Whether labels, from 0 to the highest, are whole numbers."""


FORMATS = {
    "sst": SetFormat("sst", ("sentence",), "sentiment", 4, True),
    "para": SetFormat("quora", ("sentence1", "sentence2"), "is_duplicate", 1, True),
    "sts": SetFormat("sts", ("sentence1", "sentence2"), "similarity", 5, False),
}


@dataclass(frozen=True)
class MinBertSet:
    """One set: its train and valid rows, and the files they came from."""

    train: Rows
    valid: Rows
    files: list[dict[str, Any]]


def read_minbert(folder: str | Path) -> dict[str, MinBertSet]:
    """Read sst, para and sts, in this order, from the folder of the project; malformed rows are
    named by file."""
    folder = Path(folder)
    if folder.is_file():
        raise DataError(f"{folder}: is a file, expected a folder")
    if not folder.is_dir():
        raise missing_file(folder)
    names = sorted(entry.name for entry in folder.iterdir())
    found, missing = {}, []
    for (name, form), split in ((each, split) for each in FORMATS.items() for split in SPLIT_WORDS):
        pattern = rf"(?:ids-)?{form.stem}-{SPLIT_WORDS[split]}(?:-[\w-]+)?\.csv(?:\.gz)?"
        found[name, split] = [each for each in names if re.fullmatch(pattern, each)]
        wanted = f"a file named like {form.stem}-{split.replace('valid', 'dev')}.csv[.gz]"
        missing += [] if found[name, split] else [f"{name}, {split}: {wanted}"]
    doubled = [name for each in found.values() for name in each if f"{name}.gz" in each]
    if missing or doubled:
        what = "both plain and gzip, keep one of each" if doubled else "these files are missing"
        held = ", ".join(names[:12]) or "nothing"
        raise DataError(f"{folder}: {what}:\n{listed(doubled or missing)}\nit holds: {held}")
    sets = {name: MinBertSet([], [], []) for name in FORMATS}
    for (name, split), files in found.items():
        for file in files:
            rows, described = _read(folder / file, FORMATS[name])
            getattr(sets[name], split).extend(rows)
            sets[name].files.append(described | {"path": file, "split": split, "rows": len(rows)})
    return sets


def _read(path: Path, form: SetFormat) -> tuple[Rows, dict[str, Any]]:
    table, described = read_table(path)
    wanted = (*form.sentences, form.label)
    missing = [name for name in wanted if name not in table.names]
    if missing:
        raise DataError(
            f"{path}:1: the header lacks {', '.join(missing)}; expected tab-separated columns "
            f"index, id, {', '.join(wanted)}, received {', '.join(map(repr, table.names))}"
        )
    columns = [[text.strip() for text in table.texts(table.names.index(n))[0]] for n in wanted]
    rows = list(zip(*columns, strict=True))
    problems = [
        f"{path}:{place}: {problem}"
        for place, row in zip(table.places, rows, strict=True)
        if (problem := _problem(row, form))
    ]
    table.refuse(problems)
    return [(row[:-1], float(row[-1])) for row in rows], described


def _problem(row: Sequence[str], form: SetFormat) -> str | None:
    empty = [name for name, text in zip(form.sentences, row[:-1], strict=True) if not text]
    if empty:
        return f"{' and '.join(empty)} is empty"
    try:
        value = float(row[-1])
    except ValueError:
        value = math.nan
    if 0 <= value <= form.highest and not (form.whole and value % 1):
        return None
    kind = "a whole number" if form.whole else "a number"
    return f"{form.label} is {row[-1]!r}, expected {kind} in 0..{form.highest}"


def train_word_pieces(texts: Sequence[str], *, vocab_size: int, max_length: int) -> Any:
    """Return a lower-casing BERT tokenizer whose word pieces are learned from ``texts``; pairs are
    joined by [SEP].

    >>> tokenizer = train_word_pieces(["a cat sat", "a dog sat"], vocab_size=60, max_length=16)
    >>> tokenizer.decode(tokenizer("a cat", "a dog")["input_ids"])
    '[CLS] a cat [SEP] a dog [SEP]'
    """
    library = tokenizers_library()
    from transformers import PreTrainedTokenizerFast

    normalizer = library.normalizers.BertNormalizer(lowercase=True)

    def word_pieces(*vocabulary: dict[str, int]) -> Any:
        inner = library.Tokenizer(library.models.WordPiece(*vocabulary, unk_token="[UNK]"))
        inner.normalizer = normalizer
        inner.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
        return inner

    # The trainer numbers continuations in the order of a hash table that is new in every process,
    # and ties between merges go by number: naming the continuations first, in order, makes the same
    # pieces of the same texts.
    letters = sorted(set().union(*(normalizer.normalize_str(text) for text in texts)) - set(" "))
    first = [*SPECIAL_TOKENS, *(f"##{letter}" for letter in letters)]
    teacher = word_pieces()
    trainer = library.trainers.WordPieceTrainer
    teacher.train_from_iterator(
        texts, trainer(vocab_size=vocab_size, special_tokens=first, show_progress=False)
    )
    pieces = sorted(set(teacher.get_vocab()) - set(SPECIAL_TOKENS))
    vocabulary = {piece: number for number, piece in enumerate((*SPECIAL_TOKENS, *pieces))}
    inner = word_pieces(vocabulary)
    inner.decoder = library.decoders.WordPiece()
    inner.post_processor = library.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    roles = ("pad", "unk", "cls", "sep", "mask")
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        model_max_length=max_length,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **{f"{role}_token": token for role, token in zip(roles, SPECIAL_TOKENS, strict=True)},
    )


def encode_rows(rows: Rows, tokenizer: Any, *, max_length: int) -> tuple[list[dict[str, Any]], int]:
    """Return the tokenizer's own columns (``input_ids``, ``attention_mask``, ...) of every row, one
    sentence or a pair, cut to ``max_length`` tokens, the longer sentence first; and how many were
    cut."""
    if tokenizer.pad_token_id is None:
        raise ConfigError(
            "the tokenizer has no pad token; give an encoder (BERT, RoBERTa, ...) and its tokenizer"
        )
    parts = [list(part) for part in zip(*(sentences for sentences, _ in rows), strict=True)]
    kept = tokenizer(*parts, verbose=False)
    cut = sum(len(row) > max_length for row in kept["input_ids"])
    if cut:
        how: Any = {"truncation": "longest_first", "max_length": max_length, "verbose": False}
        kept = tokenizer(*parts, **how)
    return [dict(zip(kept, row, strict=True)) for row in zip(*kept.values(), strict=True)], cut
