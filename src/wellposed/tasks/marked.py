"""Task ``marked``: which of two words stands first, or which word a pointer names."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from wellposed.options import CheckedOptions, Size
from wellposed.tasks.data.splits import SPLITS, Split
from wellposed.tasks.generators.marked import (
    GENERATOR_VERSION,
    MarkedRules,
    bag_accuracy,
    draw_distinct,
)
from wellposed.tasks.kinds.classification import ClassificationTask, LabelledExamples
from wellposed.tasks.task import register_task
from wellposed.tasks.text.tokenizers import WordEncoder


@dataclass(frozen=True)
class MarkedOptions(CheckedOptions):
    """Options of the task `marked`."""

    question: Literal["order", "recall"] = "order"
    """order: the first of two words among fillers; recall: the word in the slot that the first token names."""
    slots: int = 8
    """Words of a row, behind the question."""
    words: int = 8
    """Different words that can be the answer."""
    repeats: bool = True
    """Whether a word may stand in several slots of recall; where none does, a bag of words gives no hint at all."""
    num_train: Size = 20000
    """Generated train rows."""
    num_valid: Size = 1000
    """Generated valid rows."""
    num_test: Size = 1000
    """Generated test rows."""
    data_seed: int = 0
    """Seed of the generator, apart from the seed of training."""


class MarkedTask(ClassificationTask):
    """Classification of generated rows of words by the word that a question asks for.

    A row is a question and ``slots`` words. ``order``: two different words stand among fillers, and
    the answer is the one that stands first. ``recall``: every slot holds a word, and the answer is
    the one in the slot that the question names. No row occurs twice, in one split or in two. A
    guess from the bag of the words is right half the time in ``order``, and as often as the most
    frequent word in ``recall``; the description holds that share for test.

    Exact: the label is read from the row. Cost: a fifth of a second for 20,000 rows. When not to
    use: to measure language; this measures whether a model reads places.

    >>> from wellposed.tasks import build_task
    >>> task = build_task("marked", {"slots": 4, "num_train": 50, "num_valid": 5, "num_test": 5})
    >>> example = task.dataset("train")[0]
    >>> task.tokenizer.decode(example["input_ids"]), task.labels[example["labels"][0]]
    ('? f7 w0 w5 f3', 'w0')
    """

    name: ClassVar[str] = "marked"

    def __init__(self, options: MarkedOptions) -> None:
        self.options = options
        rules = MarkedRules(options.question, options.slots, options.words, options.repeats)
        sizes: dict[Split, int] = {split: getattr(options, f"num_{split}") for split in SPLITS}
        rows = draw_distinct(rules, sum(sizes.values()), options.data_seed)
        encoder = WordEncoder(rules.vocabulary)
        numbers = {word: number for number, word in enumerate(rules.answers)}
        examples: dict[Split, LabelledExamples] = {}
        left = iter(rows)
        for split, size in sizes.items():
            chosen = list(itertools.islice(left, size))
            labels = np.array([numbers[row.answer] for row in chosen], dtype=np.int64)
            examples[split] = LabelledExamples(
                encoder.encode([" ".join(row.tokens) for row in chosen]).ids, labels
            )
        digest = hashlib.sha256(
            "\n".join(" ".join((*row.tokens, row.answer)) for row in rows).encode()
        )
        source = {
            "source": (
                f"builtin: {options.question} of {options.words} words in {options.slots} slots"
            ),
            "generator_version": GENERATOR_VERSION,
            "data_seed": options.data_seed,
            "sha256": digest.hexdigest(),
        }
        details = {
            "best_accuracy_from_the_bag_of_words": round(bag_accuracy(rows[-sizes["test"] :]), 4)
        }
        super().__init__(
            encoder=encoder, examples=examples, labels=rules.answers, source=source, details=details
        )


register_task(
    MarkedTask, MarkedOptions, "the first of two words, or the word a pointer names (accuracy)"
)
