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
from typing import TYPE_CHECKING, Any

from wellposed.errors import ConfigError, DataError, listed, missing_extra
from wellposed.tasks.data.files import missing_file, read_table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SPLIT_WORDS = {"train": "train", "valid": "(?:dev|valid)"}


@dataclass(frozen=True)
class SetFormat:
    """How one set is stored: the name its files carry, its columns, and which labels may occur."""

    name: str
    stem: str
    sentences: tuple[str, ...]
    label: str
    low: float
    high: float
    whole: bool
    """Whether labels are whole numbers."""


FORMATS = (
    SetFormat("sst", "sst", ("sentence",), "sentiment", 0, 4, True),
    SetFormat("para", "quora", ("sentence1", "sentence2"), "is_duplicate", 0, 1, True),
    SetFormat("sts", "sts", ("sentence1", "sentence2"), "similarity", 0, 5, False),
)


@dataclass(frozen=True)
class Rows:
    """Sentences, one or two to a row, and their labels."""

    sentences: tuple[tuple[str, ...], ...]
    labels: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int | None) -> Rows:
        """Return the first ``count`` rows, or all for None."""
        return self if count is None else Rows(self.sentences[:count], self.labels[:count])


@dataclass(frozen=True)
class MinBertSet:
    """One set: its train and valid rows, and the files they came from."""

    name: str
    train: Rows
    valid: Rows
    files: tuple[dict[str, Any], ...]


def read_minbert(folder: str | Path) -> dict[str, MinBertSet]:
    """Read sst, para and sts, in this order, from the folder of the project; malformed rows are
    named by file."""
    folder = Path(folder)
    if not folder.is_dir():
        raise (
            DataError(f"{folder}: is a file, expected a folder")
            if folder.exists()
            else (missing_file(folder))
        )
    names = sorted(entry.name for entry in folder.iterdir())
    found = {(f.name, split): _files(names, f, split) for f in FORMATS for split in SPLIT_WORDS}
    missing = [
        f"{f.name}, {split}: a file named like {f.stem}-{split.replace('valid', 'dev')}.csv[.gz]"
        for f in FORMATS
        for split in SPLIT_WORDS
        if not found[f.name, split]
    ]
    doubled = [name for each in found.values() for name in each if f"{name}.gz" in each]
    if missing or doubled:
        what = "both plain and gzip, keep one of each" if doubled else "these files are missing"
        held = ", ".join(names[:12]) or "nothing"
        raise DataError(f"{folder}: {what}:\n{listed(doubled or missing)}\nit holds: {held}")
    sets = {}
    for f in FORMATS:
        splits, described = {}, []
        for split in SPLIT_WORDS:
            read = [_read(folder / name, f) for name in found[f.name, split]]
            for rows, described_file in read:
                described.append({**described_file, "split": split, "rows": len(rows)})
            splits[split] = Rows(
                tuple(sentences for rows, _ in read for sentences in rows.sentences),
                tuple(label for rows, _ in read for label in rows.labels),
            )
        sets[f.name] = MinBertSet(f.name, splits["train"], splits["valid"], tuple(described))
    return sets


def _files(names: Sequence[str], form: SetFormat, split: str) -> list[str]:
    pattern = rf"(?:ids-)?{form.stem}-{SPLIT_WORDS[split]}(?:-[\w-]+)?\.csv(?:\.gz)?"
    return [name for name in names if re.fullmatch(pattern, name)]


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
    problems = [
        f"{path}:{place}: {problem}"
        for place, *row in zip(table.places, *columns, strict=True)
        if (problem := _problem(row, form))
    ]
    table.refuse(problems)
    sentences = tuple(zip(*columns[:-1], strict=True))
    return Rows(sentences, tuple(map(float, columns[-1]))), {**described, "path": path.name}


def _problem(row: Sequence[str], form: SetFormat) -> str | None:
    empty = [name for name, text in zip(form.sentences, row[:-1], strict=True) if not text]
    if empty:
        return f"{' and '.join(empty)} is empty"
    try:
        value = float(row[-1])
    except ValueError:
        value = math.nan
    if form.low <= value <= form.high and not (form.whole and value % 1):
        return None
    kind = "a whole number" if form.whole else "a number"
    return f"{form.label} is {row[-1]!r}, expected {kind} in {form.low:g}..{form.high:g}"


def train_word_pieces(
    texts: Sequence[str], *, vocab_size: int, max_length: int
) -> PreTrainedTokenizerBase:
    """Return a lower-casing BERT tokenizer whose word pieces are learned from ``texts``; pairs are
    joined by [SEP].

    >>> tokenizer = train_word_pieces(["a cat sat", "a dog sat"], vocab_size=60, max_length=16)
    >>> tokenizer.decode(tokenizer("a cat", "a dog")["input_ids"])
    '[CLS] a cat [SEP] a dog [SEP]'
    """
    try:
        from tokenizers import (
            Tokenizer,
            decoders,
            models,
            normalizers,
            pre_tokenizers,
            processors,
            trainers,
        )
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise missing_extra("tokenizers", "hf", "word-piece tokenizers") from error
    normalizer = normalizers.BertNormalizer(lowercase=True)
    splitter = pre_tokenizers.BertPreTokenizer()
    teacher: Any = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # type: ignore[call-arg]
    teacher.normalizer, teacher.pre_tokenizer = normalizer, splitter
    # The trainer numbers continuations in the order of a hash table that is new in every process,
    # and ties between
    # merges go by number: naming the continuations first, in order, makes the same pieces of the
    # same texts.
    letters = sorted(set().union(*(normalizer.normalize_str(text) for text in texts)) - set(" "))
    trainer: Any = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *(f"##{letter}" for letter in letters)],
        show_progress=False,
    )
    teacher.train_from_iterator(texts, trainer)
    pieces = sorted(set(teacher.get_vocab()) - set(SPECIAL_TOKENS))
    vocabulary = {piece: number for number, piece in enumerate((*SPECIAL_TOKENS, *pieces))}
    inner: Any = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))  # type: ignore[call-arg]
    inner.normalizer, inner.pre_tokenizer = normalizer, splitter
    inner.decoder = decoders.WordPiece()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=max_length,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


@dataclass(frozen=True)
class EncodedRows:
    """Rows as the tokenizer's own columns (``input_ids``, ``attention_mask``, ...), and how many
    were cut."""

    columns: dict[str, list[list[int]]]
    labels: tuple[float, ...]
    cut: int

    def __len__(self) -> int:
        return len(self.labels)


def encode_rows(rows: Rows, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> EncodedRows:
    """Encode every row, one sentence or a pair, and cut to ``max_length`` tokens, the longer
    sentence first."""
    if tokenizer.pad_token_id is None:
        raise ConfigError(
            "the tokenizer has no pad token; give an encoder (BERT, RoBERTa, ...) and its tokenizer"
        )
    parts: Any = [list(part) for part in zip(*rows.sentences, strict=True)]
    full: Any = tokenizer(*parts, verbose=False)
    cut = sum(len(row) > max_length for row in full["input_ids"])
    kept: Any = (
        tokenizer(*parts, truncation="longest_first", max_length=max_length, verbose=False)
        if cut
        else full
    )
    return EncodedRows({name: list(kept[name]) for name in kept}, rows.labels, cut)
