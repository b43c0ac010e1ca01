"""Task ``retrieval`` of the Long Range Arena: do two documents belong together?"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from wellposed.errors import ConfigError
from wellposed.lazy import ModuleOnFirstUse
from wellposed.options import Size
from wellposed_lab.tasks.batches import Example, Ragged
from wellposed_lab.tasks.data import files, splits
from wellposed_lab.tasks.data.labelled import LabelledTexts, load_labelled
from wellposed_lab.tasks.data.splits import SPLITS, DataOptions, Described, Split
from wellposed_lab.tasks.data.texts import gather_prose
from wellposed_lab.tasks.kinds.classification import (
    ClassificationTask,
    LabelledExamples,
    encode_labelled,
)
from wellposed_lab.tasks.task import Kind, register_task
from wellposed_studies.tasks.drawn import DrawnOptions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    np = ModuleOnFirstUse("numpy")

LABELS = ("different", "related")
COLUMNS = ("label", "id1", "id2", "text1", "text2")
LABEL_VALUES = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}
BUILTIN_SIZES: dict[Split, int] = {"train": 2000, "valid": 200, "test": 200}
_PASSAGE = 600
_PROBE_LINES = 20
_SPLIT_OF_TENTH: dict[int, Split] = {8: "valid", 9: "test"}


@dataclass(frozen=True)
class RetrievalOptions(DrawnOptions):
    """Options of the task `retrieval`."""

    data: str = "builtin"
    """builtin (2000, 200 and 200 pairs), a tsv file or folder of pairs (label, id, id, text, text), or labelled texts.
    Pairs are made from labelled texts, by default as many as texts."""
    tokenizer: str = "byte"
    """byte, character, word (between white space) or hf:NAME_OR_PATH."""
    max_words: Size = 20000
    """Words in the vocabulary of the word tokenizer."""
    max_length: Size = 1024
    """Most tokens of one document; 4000 bytes in the Long Range Arena."""
    overflow: Literal["truncate", "error"] = "truncate"
    """truncate: cut longer documents to max_length tokens (counted in the report)."""
    drawn: ClassVar[str] = ""


@register_task("retrieval", RetrievalOptions, "whether two documents belong together (accuracy)")
class RetrievalTask(ClassificationTask):
    """Two-way classification of pairs of documents, each stored once: related or not.

    Pair files (the AAN release of the Long Range Arena) have their own labels. Of labelled texts,
    half of the pairs share a label; ``data_seed`` draws them without repetition, both from one
    split; splits share texts only if the files do. Builtin: passages of CPython's documentation,
    related if from one section. Source: Tay et al. 2021, with AAN of Radev et al. 2013.

    >>> from wellposed_lab.tasks.task import build_task
    >>> task = build_task("retrieval", {"num_train": 20, "num_valid": 4, "num_test": 4, "max_length": 64})
    >>> sorted(task.collate([task.dataset("train")[0]]))
    ['attention_mask', 'attention_mask_pair', 'input_ids', 'input_ids_pair', 'labels']
    """

    kind: ClassVar[Kind] = "sequence_pair_classification"

    def __init__(self, options: RetrievalOptions) -> None:
        self.options = options
        tables, source = _load(options)
        documents: dict[Split, LabelledTexts] = {s: part.documents for s, part in tables.items()}
        encoder, encoded, details = encode_labelled(documents, options, noun="documents")
        counts = {split: len(texts) for split, texts in documents.items()}
        super().__init__(
            encoder=encoder,
            examples={split: table.examples(encoded[split].ids) for split, table in tables.items()},
            labels=LABELS,
            max_length=options.max_length,
            described={**source, "documents": counts, **details},
        )


@dataclass(frozen=True, kw_only=True)
class DocumentPairs(LabelledExamples):
    """Rows of two documents, each stored once in ``ids``."""

    first: NDArray[np.integer]
    """Index into ``ids`` of the first document of each row."""
    second: NDArray[np.integer]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, both documents together."""
        return self.ids.lengths[self.first] + self.ids.lengths[self.second]

    def _row(self, index: int) -> Example:
        ids, pair = (self.ids[int(side[index])].tolist() for side in (self.first, self.second))
        return {"input_ids": ids, "input_ids_pair": pair, "labels": [int(self.labels[index])]}


def _load(options: RetrievalOptions) -> splits.Loaded[PairTable]:
    usual: Mapping[Split, int | None] = dict.fromkeys(SPLITS)
    if options.data == "builtin":
        tables, described = builtin_passages()
        usual = BUILTIN_SIZES
    elif is_pair_file(options):
        unread = splits.given_options(options, DrawnOptions.drawn.split())
        if unread:
            names = " and ".join(unread)
            raise ConfigError(f"option {names}: says what is drawn; {options.data} brings pairs")
        return read_pairs(options)
    else:
        tables, described = load_labelled(options)

    seed = options.data_seed or 0
    pairs: dict[Split, PairTable] = {
        split: make_pairs(tables[split], count, f"{split}/{seed}")
        for split, count in options.counts(usual).items()
    }
    rule = "half the pairs share a label, half do not; no pair twice, each as likely"
    drawn = hashlib.sha256(repr([(part.first, part.second) for part in pairs.values()]).encode())
    described |= {"pairs": rule, "data_seed": seed, "drawn": {"sha256": drawn.hexdigest()}}

    return pairs, described


def make_pairs(table: LabelledTexts, count: int | None, seed: str) -> PairTable:
    """Draw distinct pairs uniformly, every second one with a common label; None: one per text."""
    count = len(table) if count is None else count
    labels = np.unique(table.labels, return_inverse=True)[1]
    order = np.argsort(labels, kind="stable")
    # In this order a text comes after all texts of earlier labels and some of its own label.
    starts = np.searchsorted(labels[order], labels[order])
    before = {1: np.arange(len(order)) - starts, 0: starts}
    wanted = {1: (count + 1) // 2, 0: count // 2}
    problems = [
        f"{table.path}: {before[label].sum()} pairs of {'one label' if label else 'two labels'},"
        f" {wanted[label]} wanted"
        for label in (1, 0)
        if wanted[label] > before[label].sum()
    ]
    files.refuse(
        "the labelled texts give too few pairs; lower num_train, num_valid, num_test, or add texts",
        problems,
    )
    generator = random.Random(f"pairs/{seed}")
    pairs = np.empty((count, 2), np.int64)
    for label in (1, 0):
        ends = np.cumsum(before[label])
        drawn = np.array(generator.sample(range(int(ends[-1])), wanted[label]), np.int64)
        later = np.searchsorted(ends, drawn, side="right")
        earlier = drawn - (ends - before[label])[later] + label * starts[later]
        pairs[1 - label :: 2] = np.stack((order[later], order[earlier]), -1)

    turned = generator.sample(range(count), count // 2)
    pairs[turned] = pairs[turned, ::-1]
    return PairTable(table, *pairs.T.tolist(), labels=[1, 0] * (count // 2) + [1] * (count % 2))


@dataclass(frozen=True)
class PairTable:
    """Documents, each once, and the pairs ``documents[first[i]]``, ``documents[second[i]]``."""

    documents: LabelledTexts
    """From a pair file, ``labels`` are document ids, and ``places`` the lines of their first use."""
    first: Sequence[int]
    second: Sequence[int]
    labels: Sequence[int]

    def __len__(self) -> int:
        return len(self.labels)

    def examples(self, ids: Ragged) -> DocumentPairs:
        """Return the pairs of documents with the token ids ``ids``."""
        columns = (np.array(values, np.int64) for values in (self.labels, self.first, self.second))
        labels, first, second = columns
        return DocumentPairs(ids, labels, first=first, second=second)

    def select(self, rows: Sequence[int]) -> PairTable:
        used = sorted({index for row in rows for index in (self.first[row], self.second[row])})
        position = {index: number for number, index in enumerate(used)}
        return PairTable(
            self.documents.select(used),
            [position[self.first[row]] for row in rows],
            [position[self.second[row]] for row in rows],
            [self.labels[row] for row in rows],
        )


def is_pair_file(options: DataOptions) -> bool:
    """Return whether the train file is a tsv and most of its first 20 lines have five columns."""
    if options.data.startswith("hf:"):
        return False
    path = splits.find_split_files(options, suffixes=files.TABLE_SUFFIXES)[0]["train"]
    if not files.is_named(path, ".tsv"):
        return False
    lines = files.read_text(path).text.split("\n", _PROBE_LINES)[:_PROBE_LINES]
    pairs = sum(line.count("\t") == len(COLUMNS) - 1 for line in lines)
    return 2 * pairs > sum(map(bool, lines))


def read_pairs(options: DataOptions) -> splits.Loaded[PairTable]:
    """Read pair files; missing splits are cut from train."""

    def read_file(path: Path) -> tuple[PairTable, Described]:
        table, described = files.read_table(path, names=COLUMNS)
        return pairs_of(table), described

    tables, described = splits.load_splits(options, suffixes=(".tsv",), read_file=read_file)
    described |= {"columns": ", ".join(COLUMNS)}
    if len(tables) < len(SPLITS):
        described |= {"cut_note": "documents of cut pairs may recur in train"}
    return splits.cut_missing(tables, tables["train"].documents.path, described)


def pairs_of(table: files.Table) -> PairTable:
    """Return the pairs of rows (label, id, id, text, text); equal texts are one document."""
    documents: dict[str, tuple[str, int]] = {}
    problems: list[str] = []
    rows = list(zip(*map(table.column, range(len(COLUMNS))), strict=True))
    for line, (label, *ids, first, second) in zip(table.places, rows, strict=True):
        if label not in LABEL_VALUES:
            wrong = f"label {label!r}, expected one of {', '.join(LABEL_VALUES)}"
            problems.append(f"{table.where}:{line}: {wrong}")
        empty = [name for name, text in zip(COLUMNS[3:], (first, second), strict=True) if not text]
        problems += [f"{table.where}:{line}: {' and '.join(empty)} is empty"] if empty else []
        for name, text in zip(ids, (first, second), strict=True):
            documents.setdefault(text, (name, line))

    table.refuse(problems)
    numbers = {text: number for number, text in enumerate(documents)}
    ids, lines = zip(*documents.values(), strict=True)
    texts = LabelledTexts(table.where, list(documents), ids, lines, ", ".join(COLUMNS))
    first, second = ([numbers[row[side]] for row in rows] for side in (3, 4))
    return PairTable(texts, first, second, [LABEL_VALUES[row[0]] for row in rows])


def builtin_passages() -> splits.Loaded[LabelledTexts]:
    """Cut the builtin prose into passages labelled by section, each section in one split."""
    prose, identity = gather_prose()
    sections = [section for section in prose.split("\n\n\n") if len(section) >= 2 * _PASSAGE]
    passages: dict[Split, list[tuple[str, str, int]]] = {split: [] for split in SPLITS}
    for number, section in enumerate(sections):
        passages[_SPLIT_OF_TENTH.get(number % 10, "train")] += [
            (section[start : start + _PASSAGE], str(number), number)
            for start in range(0, len(section) - _PASSAGE + 1, _PASSAGE)
        ]

    source = "passages of CPython's documentation and docstrings; related = of the same section"
    described = {
        "source": f"builtin: {source}",
        **identity,
        "passage_characters": _PASSAGE,
        "sections": len(sections),
    }
    tables: dict[Split, LabelledTexts] = {
        split: LabelledTexts("builtin", *zip(*rows, strict=True), columns="section, passage")
        for split, rows in passages.items()
    }

    return tables, described
