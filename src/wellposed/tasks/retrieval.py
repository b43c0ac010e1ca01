"""Task ``retrieval``: do two documents belong together? Two towers over bytes, as in the Long Range
Arena."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from wellposed.errors import ConfigError, DataError, listed
from wellposed.options import CheckedOptions, Size
from wellposed.tasks.checks import given_options, refuse_options
from wellposed.tasks.data.documents import (
    BUILTIN_SIZES,
    PairTable,
    builtin_passages,
    is_pair_file,
    read_pairs,
)
from wellposed.tasks.data.labelled import encode_labelled, load_labelled
from wellposed.tasks.data.tables import LabelledTexts
from wellposed.tasks.kinds.classification import ClassificationTask, LabelledPairs
from wellposed.tasks.task import SPLITS, TASKS, Kind, Split, TaskSpec

LABELS = ("different", "related")
_MAX_DRAWS = 50


@dataclass(frozen=True)
class RetrievalOptions(CheckedOptions):
    """Options of the task `retrieval`."""

    data: str = "builtin"
    """builtin, a tsv file or folder of pairs (label, id, id, text, text), or a labelled file or
    folder."""
    valid: str | None = None
    """File of the valid split; found beside the train file (eval too), or cut from it, where not
    given."""
    test: str | None = None
    """File of the test split; found beside the train file, or cut from it, where not given."""
    format: Literal["auto", "pairs", "labelled"] = "auto"
    """pairs is the AAN file of the Long Range Arena; labelled makes pairs of texts; auto counts the
    columns."""
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
    """A longer document keeps its first max_length tokens (counted in the report), or is an
    error."""
    data_seed: int | None = None
    """Seed of the pairs made of labelled texts, apart from the seed of training; 0 where not
    given."""


class RetrievalTask(ClassificationTask):
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

    name: ClassVar[str] = "retrieval"
    kind: ClassVar[Kind] = "sequence_pair_classification"

    def __init__(self, options: RetrievalOptions) -> None:
        from wellposed.tasks.text.encoders import build_encoder

        self.options = options
        tables, source = _load(options)
        documents: dict[Split, LabelledTexts] = {
            split: table.documents for split, table in tables.items()
        }
        encoder = build_encoder(
            options.tokenizer, documents["train"].texts, max_words=options.max_words
        )
        encoded, details = encode_labelled(encoder, documents, options, noun="documents")
        super().__init__(
            encoder=encoder,
            examples={
                split: LabelledPairs(encoded[split].ids, *table.arrays())
                for split, table in tables.items()
            },
            labels=LABELS,
            max_length=options.max_length,
            source=source,
            details={"documents": {split: len(documents[split]) for split in SPLITS}, **details},
        )


def _load(options: RetrievalOptions) -> tuple[dict[Split, PairTable], dict[str, Any]]:
    sizes: dict[Split, int | None] = {split: getattr(options, f"num_{split}") for split in SPLITS}
    if options.data == "builtin":
        if given_options(options, ("valid", "test")) or options.format == "pairs":
            raise ConfigError(
                "retrieval: valid, test and format='pairs' need data=FILE; builtin passages bring"
                " splits"
            )
        tables, described = builtin_passages()
        sizes = {
            split: BUILTIN_SIZES[split] if size is None else size for split, size in sizes.items()
        }
    elif options.format == "pairs" or (options.format == "auto" and is_pair_file(options.data)):
        reason = f"bound pairs that are made; {options.data} brings pairs"
        refuse_options(
            "retrieval", options, (*(f"num_{split}" for split in SPLITS), "data_seed"), reason
        )
        return read_pairs(options.data, valid=options.valid, test=options.test)
    else:
        tables, described = load_labelled(options.data, valid=options.valid, test=options.test)
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
    if problems:
        raise DataError(
            "the labelled texts give too few pairs; lower num_train, num_valid, num_test, or add"
            " texts:\n" + listed(problems)
        )
    drawn = _draw(groups, table.labels, wanted, random.Random(f"pairs/{seed}"))
    return PairTable(
        table, [pair[0] for pair in drawn], [pair[1] for pair in drawn], list(drawn.values())
    )


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
    tries = 0
    while any(left.values()):
        label = 1 if left[1] >= left[0] and left[1] else 0
        one = generator.choice(related if label else everything)
        other = generator.choice(groups[labels[one]] if label else everything)
        tries += 1
        if tries > _MAX_DRAWS * sum(wanted.values()):
            return _enumerate(labels, wanted, generator)
        if one == other or (labels[one] == labels[other]) != bool(label):
            continue
        if (one, other) in drawn or (other, one) in drawn:
            continue
        drawn[one, other] = label
        left[label] -= 1
    return drawn


def _enumerate(
    labels: Sequence[str], wanted: Mapping[int, int], generator: random.Random
) -> dict[tuple[int, int], int]:
    """Draw from the list of all pairs, where drawing one by one meets the same pairs again and
    again."""
    pairs: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
    for one in range(len(labels)):
        for other in range(one):
            pairs[int(labels[one] == labels[other])].append((one, other))
    chosen = [
        (pair, label) for label in (1, 0) for pair in generator.sample(pairs[label], wanted[label])
    ]
    generator.shuffle(chosen)
    return dict(chosen)


TASKS.register("retrieval")(
    TaskSpec(
        "retrieval",
        RetrievalOptions,
        RetrievalTask,
        "whether two documents belong together (accuracy)",
    )
)
