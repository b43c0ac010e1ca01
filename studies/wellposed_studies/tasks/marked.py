"""Task ``marked``: the first of two words, or the one that a pointer names; no bag solves it."""

from __future__ import annotations

import hashlib
import itertools
import random
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from wellposed.lazy import ModuleOnFirstUse
from wellposed.options import CheckedOptions, Ge, Size
from wellposed_lab.tasks.data.splits import SPLITS, Split
from wellposed_lab.tasks.kinds.classification import ClassificationTask, LabelledExamples
from wellposed_lab.tasks.task import register_task
from wellposed_lab.tasks.text.tokenizers import WordEncoder
from wellposed_studies.tasks.drawn import draw_distinct, drawn_facts

if TYPE_CHECKING:
    import numpy as np
else:
    np = ModuleOnFirstUse("numpy")

GENERATOR_VERSION = 1
ASK = "?"
FILLERS = tuple(f"f{number}" for number in range(8))
MAX_FRUITLESS_TRIES = 10_000


class Drawn(NamedTuple):
    """One row and its answer."""

    tokens: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class MarkedOptions(CheckedOptions):
    """Options of the task `marked`."""

    question: Literal["order", "recall"] = "order"
    """order: the first of two words among fillers; recall: the word in the slot that the first token names."""
    slots: Annotated[int, Ge(2)] = 8
    """Words of a row after the question."""
    words: Annotated[int, Ge(2)] = 8
    """Different words that can be the answer."""
    repeats: bool = True
    """Whether a word may occur in several slots of recall; if not, a bag of words gives no hint."""
    num_train: Size = 20000
    """Generated train rows."""
    num_valid: Size = 1000
    """Generated valid rows."""
    num_test: Size = 1000
    """Generated test rows."""
    data_seed: int = 0
    """Seed of the generator, apart from the seed of training."""

    def problems(self) -> list[str]:
        """Return the problem of options without repeats."""
        if self.repeats:
            return []
        if self.question == "order":
            what = "belongs to question recall; the two words of order always differ"
            return [f"repeats = False {what}"]
        few = f"words = {self.words}, expected at least slots = {self.slots} if none may repeat"
        return [few] if self.words < self.slots else []

    @property
    def answers(self) -> tuple[str, ...]:
        """The possible answers, equally frequent."""
        return tuple(f"w{number}" for number in range(self.words))

    @property
    def vocabulary(self) -> tuple[str, ...]:
        named = (f"@{slot}" for slot in range(self.slots))
        return (*((ASK, *FILLERS) if self.question == "order" else named), *self.answers)


def answer_of(tokens: tuple[str, ...]) -> str:
    ask, *slots = tokens
    if ask.startswith("@"):
        return slots[int(ask[1:])]
    return next(word for word in slots if word.startswith("w"))


def bag_accuracy(rows: list[Drawn]) -> float:
    """Return the exact accuracy of the best guess from a bag of words: its most frequent word."""
    total = 0.0
    for tokens, _ in rows:
        candidates = [word for word in tokens[1:] if word.startswith("w")]
        total += max(candidates.count(word) for word in candidates) / len(candidates)
    return total / len(rows)


def draw_rows(options: MarkedOptions, count: int, seed: int) -> list[Drawn]:
    """Draw ``count`` different rows, determined by options and seed."""
    draw = partial(_draw, options, random.Random(f"marked/{GENERATOR_VERSION}/{seed}"))
    few = f"marked: {options} allow too few different rows"
    remedy = "raise slots or words"
    drawn = draw_distinct(draw, count, MAX_FRUITLESS_TRIES, few, remedy)
    return [Drawn(tokens, answer_of(tokens)) for tokens in drawn]


def _draw(options: MarkedOptions, generator: random.Random) -> tuple[str, ...]:
    if options.question == "recall":
        index = generator.randrange(options.slots)
        draw = generator.choices if options.repeats else generator.sample
        return (f"@{index}", *draw(options.answers, k=options.slots))
    slots = generator.choices(FILLERS, k=options.slots)
    places = generator.sample(range(options.slots), 2)
    for index, word in zip(places, generator.sample(options.answers, 2), strict=True):
        slots[index] = word
    return (ASK, *slots)


@register_task(
    "marked", MarkedOptions, "the first of two words, or the word a pointer names (accuracy)"
)
class MarkedTask(ClassificationTask):
    """Classification of generated rows of words by the word that a question asks for.

    In `order` two different words are among fillers, and the answer is the first. In `recall` every
    slot has a word, and the question names one. No row occurs twice in all splits. A guess from the
    bag of words is right half the time in `order`, and as often as the most frequent word in
    `recall`; the description has that share for test. Status: exact labels. Cost: 0.2 s for 20,000
    rows. Not a measure of language, only of reading positions.

    >>> from wellposed_lab.tasks.task import build_task
    >>> task = build_task("marked", {"slots": 4, "num_train": 50, "num_valid": 5, "num_test": 5})
    >>> example = task.dataset("train")[0]
    >>> task.tokenizer.decode(example["input_ids"]), task.labels[example["labels"][0]]
    ('? f7 w0 w5 f3', 'w0')
    """

    def __init__(self, options: MarkedOptions) -> None:
        self.options = options
        sizes: dict[Split, int] = {split: getattr(options, f"num_{split}") for split in SPLITS}
        rows = draw_rows(options, sum(sizes.values()), options.data_seed)
        encoder = WordEncoder(options.vocabulary)
        numbers = options.answers.index
        examples: dict[Split, LabelledExamples] = {}
        left = iter(rows)
        for split, size in sizes.items():
            chosen = list(itertools.islice(left, size))
            answers = np.array([numbers(row.answer) for row in chosen], dtype=np.int64)
            ids = encoder.encode([" ".join(row.tokens) for row in chosen]).ids
            examples[split] = LabelledExamples(ids, answers)

        written = "\n".join(" ".join((*row.tokens, row.answer)) for row in rows)
        source = f"{options.question} of {options.words} words in {options.slots} slots"
        digest = hashlib.sha256(written.encode()).hexdigest()
        bag = round(bag_accuracy(rows[-sizes["test"] :]), 4)
        described = drawn_facts(
            source,
            GENERATOR_VERSION,
            options.data_seed,
            digest,
            best_accuracy_from_the_bag_of_words=bag,
        )
        labels = options.answers
        super().__init__(encoder=encoder, examples=examples, labels=labels, described=described)
