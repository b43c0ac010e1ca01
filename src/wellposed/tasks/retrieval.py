"""Task ``retrieval`` of the Long Range Arena: do two documents belong together?"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from wellposed.errors import ConfigError
from wellposed.options import Size
from wellposed.tasks.batches import Ragged
from wellposed.tasks.data import files, splits
from wellposed.tasks.data.labelled import LabelledTexts, has_class_folders, load_labelled
from wellposed.tasks.data.splits import SPLITS, DataOptions, Described, Split
from wellposed.tasks.data.texts import gather_prose
from wellposed.tasks.kinds import classification
from wellposed.tasks.task import Kind, register_task

LABELS = ("different", "related")
COLUMNS = ("label", "id1", "id2", "text1", "text2")
LABEL_VALUES = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}
BUILTIN_SIZES: dict[Split, int] = {"train": 2000, "valid": 200, "test": 200}
_PASSAGE = 600
_PROBE_LINES = 20
_SPLIT_OF_TENTH: dict[int, Split] = {8: "valid", 9: "test"}
_MAX_DRAWS = 50


@dataclass(frozen=True)
class RetrievalOptions(DataOptions):
    """Options of the task `retrieval`."""

    data: str = "builtin"
    """builtin, a tsv file or folder of pairs (label, id, id, text, text), or a labelled file or folder."""
    format: Literal["auto", "pairs", "labelled"] = "auto"
    """pairs is the AAN file of the Long Range Arena; labelled makes pairs of texts; auto counts the columns."""
    num_train: Size | None = None
    """Train pairs made of labelled texts; as many as texts (2000 for builtin) where not given."""
    num_valid: Size | None = None
    """Valid pairs made of labelled texts; as many as texts (200 for builtin) where not given."""
    num_test: Size | None = None
    """Test pairs made of labelled texts; as many as texts (200 for builtin) where not given."""
    tokenizer: str = "byte"
    """byte, character, word (between white space) or hf:NAME_OR_PATH."""
    max_words: Size = 20000
    """Words in the vocabulary of the word tokenizer."""
    max_length: Size = 1024
    """Most tokens of one document; the Long Range Arena takes 4000 bytes."""
    overflow: Literal["truncate", "error"] = "truncate"
    """A longer document keeps its first max_length tokens (counted in the report), or is an error."""
    data_seed: int | None = None
    """Seed of the pairs made of labelled texts, apart from the seed of training; 0 where not given."""

    def problems(self) -> list[str]:
        """Return one line for each option that does not fit the data."""
        pairs = self.data == "builtin" and self.format == "pairs"
        wrong = ["format='pairs' needs data=FILE; builtin has labelled passages"] if pairs else []
        return [*super().problems(), *wrong]


@register_task("retrieval", RetrievalOptions, "whether two documents belong together (accuracy)")
class RetrievalTask(classification.ClassificationTask):
    """Two-way classification of pairs of documents: related or not.

    From a pair file (the AAN release of the Long Range Arena) labels are those of the file. From
    labelled texts, half of the pairs have one label and half have two, drawn without repetition by
    ``data_seed``; the two texts of a pair come from the same split, and no split shares a text
    unless the files do. The builtin source is passages of CPython's documentation, related where
    they come from the same section.

    A document that occurs in many pairs is held once. Source: Tay et al. 2021, "Long Range Arena",
    with the AAN corpus of Radev et al. 2013.

    >>> from wellposed.tasks import build_task
    >>> task = build_task("retrieval", {"num_train": 20, "num_valid": 4, "num_test": 4, "max_length": 64})
    >>> sorted(task.collate([task.dataset("train")[0]]))
    ['attention_mask', 'attention_mask_pair', 'input_ids', 'input_ids_pair', 'labels']
    """

    kind: ClassVar[Kind] = "sequence_pair_classification"

    def __init__(self, options: RetrievalOptions) -> None:
        self.options = options
        tables, source = _load(options)
        documents: dict[Split, LabelledTexts] = {s: each.documents for s, each in tables.items()}
        found = classification.encode_labelled(documents, options, noun="documents")
        encoder, encoded, details = found
        counts = {split: len(held) for split, held in documents.items()}
        super().__init__(
            encoder=encoder,
            examples={split: table.examples(encoded[split].ids) for split, table in tables.items()},
            labels=LABELS,
            max_length=options.max_length,
            described={**source, "documents": counts, **details},
        )


def _load(options: RetrievalOptions) -> splits.Loaded[PairTable]:
    sizes: dict[Split, int | None] = {split: getattr(options, f"num_{split}") for split in SPLITS}
    if options.data == "builtin":
        tables, described = builtin_passages()
        sizes = {split: sizes[split] or BUILTIN_SIZES[split] for split in SPLITS}
    elif options.format == "pairs" or (options.format == "auto" and is_pair_file(options)):
        drawn = ("num_train", "num_valid", "num_test", "data_seed")
        if given := splits.given_options(options, drawn):
            names = " and ".join(given)
            raise ConfigError(f"option {names}: says what is drawn; {options.data} brings pairs")
        return read_pairs(options)
    else:
        tables, described = load_labelled(options)
    seed = options.data_seed or 0
    pairs: dict[Split, PairTable] = {
        split: make_pairs(tables[split], sizes[split], f"{split}/{seed}") for split in SPLITS
    }
    how = "half the pairs share a label, half do not; no pair twice"
    return pairs, {**described, "pairs": how, "data_seed": seed}


def make_pairs(table: LabelledTexts, count: int | None, seed: str) -> PairTable:
    """Draw ``count`` distinct pairs of texts, every second one with a common label; as many as
    texts for None."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, label in enumerate(table.labels):
        groups[label].append(index)
    total = len(table.texts)
    count = total if count is None else count
    wanted = {1: (count + 1) // 2, 0: count // 2}
    within = sum(len(group) * (len(group) - 1) // 2 for group in groups.values())
    available = {1: within, 0: total * (total - 1) // 2 - within}
    problems = [
        f"{table.path}: {available[label]} pairs of {'one label' if label else 'two labels'},"
        f" {wanted[label]} wanted"
        for label in (1, 0)
        if wanted[label] > available[label]
    ]
    files.refuse(
        "the labelled texts give too few pairs; lower num_train, num_valid, num_test, or add texts",
        problems,
    )
    drawn = _draw(groups, table.labels, wanted, random.Random(f"pairs/{seed}"))
    return PairTable(table, [one for one, _ in drawn], [two for _, two in drawn], [*drawn.values()])


def _draw(
    groups: Mapping[str, Sequence[int]],
    labels: Sequence[str],
    wanted: Mapping[int, int],
    generator: random.Random,
) -> dict[tuple[int, int], int]:
    """Return pairs with their label, related and different in turn."""
    everything = range(len(labels))
    related = [index for index in everything if len(groups[labels[index]]) > 1]
    drawn: dict[tuple[int, int], int] = {}
    left = dict(wanted)
    limit = _MAX_DRAWS * sum(wanted.values())
    for tries in range(limit + 1):
        label = 1 if left[1] >= left[0] and left[1] else 0
        one = generator.choice(related if label else everything)
        other = generator.choice(groups[labels[one]] if label else everything)
        refused = tries == limit or one == other or (one, other) in drawn or (other, one) in drawn
        if not refused and (labels[one] == labels[other]) == bool(label):
            drawn[one, other] = label
            left[label] -= 1
            if not any(left.values()):
                return drawn
    return _enumerate(labels, wanted, generator)


def _enumerate(
    labels: Sequence[str], wanted: Mapping[int, int], generator: random.Random
) -> dict[tuple[int, int], int]:
    """Draw from the list of all pairs, where drawing one by one meets the same pairs again and
    again."""
    pairs: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
    for one in range(len(labels)):
        for other in range(one):
            pairs[int(labels[one] == labels[other])].append((one, other))
    draws = {label: generator.sample(pairs[label], wanted[label]) for label in (1, 0)}
    chosen = [(pair, label) for label, drawn in draws.items() for pair in drawn]
    generator.shuffle(chosen)
    return dict(chosen)


@dataclass(frozen=True)
class PairTable:
    """Documents, each once, and pairs of them: ``documents[first[i]]`` and
    ``documents[second[i]]``."""

    documents: LabelledTexts
    """``labels`` are document ids where the source is a pair file; ``places`` are the lines they
    are first seen at."""
    first: Sequence[int]
    second: Sequence[int]
    labels: Sequence[int]

    def __len__(self) -> int:
        return len(self.labels)

    def examples(self, ids: Ragged) -> classification.LabelledExamples:
        """Return the pairs of documents with the token ids ``ids``."""
        columns = (np.array(values, np.int64) for values in (self.labels, self.first, self.second))
        labels, first, second = columns
        return classification.LabelledExamples(ids, labels, first=first, second=second)

    def select(self, rows: Sequence[int]) -> PairTable:
        """Return the pairs ``rows`` and the documents they use."""
        used = sorted({index for row in rows for index in (self.first[row], self.second[row])})
        position = {index: number for number, index in enumerate(used)}
        return PairTable(
            self.documents.select(used),
            [position[self.first[row]] for row in rows],
            [position[self.second[row]] for row in rows],
            [self.labels[row] for row in rows],
        )


def is_pair_file(options: DataOptions) -> bool:
    """Return whether the train file is a tsv whose first lines, most of 20, have five columns."""
    if options.data.startswith("hf:") or has_class_folders(options.data):
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
    """Return the pairs of rows of label (0, 1, 0.0 or 1.0), id, id, text and text; a document is
    its text."""
    documents: dict[str, tuple[str, int]] = {}
    problems: list[str] = []
    rows = list(zip(*map(table.column, range(len(COLUMNS))), strict=True))
    for place, (label, *ids, first, second) in zip(table.places, rows, strict=True):
        if label not in LABEL_VALUES:
            wrong = f"label {label!r}, expected one of {', '.join(LABEL_VALUES)}"
            problems.append(f"{table.where}:{place}: {wrong}")
        empty = [name for name, text in zip(COLUMNS[3:], (first, second), strict=True) if not text]
        problems += [f"{table.where}:{place}: {' and '.join(empty)} is empty"] if empty else []
        for name, text in zip(ids, (first, second), strict=True):
            documents.setdefault(text, (name, place))
    table.refuse(problems)
    numbers = {text: number for number, text in enumerate(documents)}
    ids, lines = zip(*documents.values(), strict=True)
    held = LabelledTexts(table.where, list(documents), ids, lines, ", ".join(COLUMNS))
    first, second = ([numbers[row[side]] for row in rows] for side in (3, 4))
    return PairTable(held, first, second, [LABEL_VALUES[row[0]] for row in rows])


def builtin_passages() -> splits.Loaded[LabelledTexts]:
    """Cut the sections of the builtin prose into passages labelled by section, each section in one
    split."""
    prose, identity = gather_prose()
    sections = [section for section in prose.split("\n\n\n") if len(section) >= 2 * _PASSAGE]
    found: dict[Split, list[tuple[str, str, int]]] = {split: [] for split in SPLITS}
    for number, section in enumerate(sections):
        found[_SPLIT_OF_TENTH.get(number % 10, "train")] += [
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
        for split, rows in found.items()
    }
    return tables, described
