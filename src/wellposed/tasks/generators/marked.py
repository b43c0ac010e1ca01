"""Rows of words whose label depends on word order: a bag of words cannot tell it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, NamedTuple

from wellposed.errors import ConfigError

GENERATOR_VERSION = 1
ASK, FILLERS = "?", tuple(f"f{number}" for number in range(8))
MAX_FRUITLESS_TRIES = 10_000


class Drawn(NamedTuple):
    """One row and what is asked of it."""

    tokens: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class MarkedRules:
    """What a row holds: a question, then one word in each slot."""

    question: Literal["order", "recall"]
    slots: int
    words: int
    """Different words that can be the answer, each equally often."""
    repeats: bool = True
    """Whether a word may stand in several slots of recall."""

    def __post_init__(self) -> None:
        problems = [
            f"{name} = {value}, expected at least 2"
            for name, value in (("slots", self.slots), ("words", self.words))
            if value < 2
        ]
        if not self.repeats and self.question == "order":
            problems.append(
                "repeats = False belongs to question recall; the two words of order always differ"
            )
        elif not self.repeats and self.words < self.slots:
            problems.append(
                f"words = {self.words}, expected at least slots = {self.slots} where none may"
                " repeat"
            )
        if problems:
            raise ConfigError("marked cannot be generated: " + "; ".join(problems))

    @property
    def answers(self) -> tuple[str, ...]:
        """The words that can be asked for."""
        return tuple(f"w{number}" for number in range(self.words))

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Every token of a row."""
        asks = (
            (ASK, *FILLERS)
            if self.question == "order"
            else tuple(f"@{slot}" for slot in range(self.slots))
        )
        return (*asks, *self.answers)


def answer_of(tokens: tuple[str, ...]) -> str:
    """Return the answer of a row, read from its tokens alone.

    >>> answer_of(("?", "f3", "w5", "f1", "w2")), answer_of(("@1", "w4", "w0", "w2"))
    ('w5', 'w0')
    """
    ask, *slots = tokens
    return (
        slots[int(ask[1:])]
        if ask.startswith("@")
        else next(word for word in slots if word.startswith("w"))
    )


def bag_accuracy(rows: list[Drawn]) -> float:
    """Return the share of rows that a guess from the bag of their words alone gets right, at best,
    in expectation.

    Exact for the law of the generator: given the words, but not their places, every slot is equally
    likely to be the one asked for, so the best guess is the most frequent word, right as often as
    its share of the words.

    >>> bag_accuracy([Drawn(("@1", "w4", "w0", "w4", "w4"), "w0")])
    0.75
    """
    total = 0.0
    for tokens, _ in rows:
        candidates = [word for word in tokens[1:] if word.startswith("w")]
        total += max(candidates.count(word) for word in candidates) / len(candidates)
    return total / len(rows)


def draw_distinct(rules: MarkedRules, count: int, seed: int) -> list[Drawn]:
    """Draw ``count`` different rows, by (rules, seed) alone."""
    generator = random.Random(f"marked/{GENERATOR_VERSION}/{seed}")
    drawn: dict[tuple[str, ...], None] = {}
    fruitless = 0
    while len(drawn) < count:
        before = len(drawn)
        drawn.setdefault(_draw(rules, generator))
        fruitless = fruitless + 1 if len(drawn) == before else 0
        if fruitless > MAX_FRUITLESS_TRIES:
            raise ConfigError(
                f"marked: {rules} allow too few different rows: {len(drawn)} found, {count} wanted;"
                " lower num_train, num_valid and num_test, or raise slots or words"
            )
    return [Drawn(tokens, answer_of(tokens)) for tokens in drawn]


def _draw(rules: MarkedRules, generator: random.Random) -> tuple[str, ...]:
    if rules.question == "recall":
        place, draw = (
            generator.randrange(rules.slots),
            generator.choices if rules.repeats else generator.sample,
        )
        return (f"@{place}", *draw(rules.answers, k=rules.slots))
    slots = generator.choices(FILLERS, k=rules.slots)
    places = generator.sample(range(rules.slots), 2)
    for place, word in zip(places, generator.sample(rules.answers, 2), strict=True):
        slots[place] = word
    return (ASK, *slots)
