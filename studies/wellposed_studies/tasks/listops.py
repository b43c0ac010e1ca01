"""Task ``listops``: the value of a list expression (Nangia and Bowman 2018; Tay et al. 2021)."""

from __future__ import annotations

import hashlib
import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from wellposed.errors import ConfigError
from wellposed.lazy import ModuleOnFirstUse
from wellposed.options import CheckedOptions, Ge
from wellposed_lab.tasks.batches import Ragged
from wellposed_lab.tasks.data import files, splits
from wellposed_lab.tasks.data.labelled import LabelledTexts, load_labelled
from wellposed_lab.tasks.data.splits import SPLITS, Described, Split
from wellposed_lab.tasks.kinds.classification import (
    ClassificationTask,
    LabelledExamples,
    refuse_longer,
)
from wellposed_lab.tasks.task import register_task
from wellposed_lab.tasks.text.tokenizers import NUM_SPECIAL, WordEncoder
from wellposed_studies.tasks.drawn import DrawnOptions, draw_distinct, drawn_facts

if TYPE_CHECKING:
    import numpy as np
else:
    np = ModuleOnFirstUse("numpy")

GENERATOR_VERSION = 1
DIGITS = tuple("0123456789")
CLOSE = "]"
PARENTHESES = "()"
# Equally likely outcomes of a node: the first quarter is an operator, three are each digit.
_SLOTS = 40
_OPERATOR_SLOTS = 10
_SLOT_DIGITS = [0] * _OPERATOR_SLOTS + [digit for digit in range(10) for _ in range(3)]
MAX_FRUITLESS_TRIES = 200_000


OPERATORS: dict[str, Callable[[Sequence[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
    "[FIRST": lambda values: values[0],
    "[LAST": lambda values: values[-1],
}
GENERATED_OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
VOCABULARY = (*DIGITS, *OPERATORS, CLOSE)


def evaluate(tokens: Sequence[str]) -> int:
    """Return the value of an expression, 0 to 9; MED rounds the median down, SM is a sum modulo 10.

    Raises:
        ValueError: the expression is malformed; the message names the token.

    >>> evaluate("[MAX 2 [SM 8 5 ] [MED 4 9 ] ]".split())
    6
    """
    stack: list[tuple[str, list[int]]] = [("", [])]
    for position, token in enumerate(tokens, 1):
        if token in OPERATORS:
            stack.append((token, []))
        elif token == CLOSE:
            if len(stack) == 1:
                raise ValueError(f"token {position} is ']' without an open operator")
            operator, values = stack.pop()
            if not values:
                raise ValueError(f"token {position} closes {operator!r}, which has no argument")
            stack[-1][1].append(OPERATORS[operator](values))
        elif len(token) == 1 and token in DIGITS:
            stack[-1][1].append(int(token))
        else:
            raise ValueError(f"token {position} is {token!r}, expected {', '.join(VOCABULARY)}")

    if len(stack) > 1:
        raise ValueError(f"{stack[-1][0]!r} is not closed by ']'")
    values = stack[0][1]
    if len(values) != 1:
        raise ValueError(f"{len(values)} expressions, expected one")
    return values[0]


@dataclass(frozen=True)
class ListOpsRules(CheckedOptions):
    """Bounds of the generator; Long Range Arena is (10, 10, 500, 2000)."""

    max_depth: Annotated[int, Ge(2)]
    """Largest depth of a digit; operators nest at most max_depth - 1 deep."""
    max_args: Annotated[int, Ge(2)]
    """An operator has 2 to max_args arguments, each count equally likely."""
    min_length: int
    """Expressions have more tokens than this, parentheses not counted."""
    max_length: int
    """Expressions have fewer tokens than this."""

    def problems(self) -> list[str]:
        """Return the problem if no expression has such a length."""
        bounds = f"min_length = {self.min_length} and max_length = {self.max_length}"
        why = "leave no length strictly between them that an expression (4 tokens or more) can have"
        return [f"{bounds} {why}"] if self.max_length <= max(self.min_length, 3) + 1 else []


class _TooLongError(Exception):
    """The tree being drawn has reached the length at which it will be rejected."""


def draw_expressions(rules: ListOpsRules, *, seed: int) -> Iterator[tuple[bytes, int]]:
    """Yield expressions (indices into ``VOCABULARY``) and values by the Long Range Arena's rules.

    A node above max_depth is an operator with probability 1/4, else a digit; operator, digit and
    number of arguments are uniform. Trees out of bounds are rejected (early, if too long, which
    does not change the distribution).

    >>> expression, value = next(draw_expressions(ListOpsRules(4, 4, 5, 12), seed=1))
    >>> evaluate([VOCABULARY[token] for token in expression]) == value
    True
    """
    draw = random.Random(f"listops/{GENERATOR_VERSION}/{seed}").random
    operators = [(VOCABULARY.index(name), OPERATORS[name]) for name in GENERATED_OPERATORS]
    close = VOCABULARY.index(CLOSE)
    most = rules.max_length - 1
    tokens: list[int] = []

    def nodes(count: int, depth: int) -> list[int]:
        """Draw trees and return their values; one random number chooses operator or digit."""
        values = []
        lowest = _OPERATOR_SLOTS if depth >= rules.max_depth else 0
        for _ in range(count):
            if len(tokens) >= most:
                raise _TooLongError
            slot = lowest + int(draw() * (_SLOTS - lowest))
            if slot >= _OPERATOR_SLOTS:
                values.append(_SLOT_DIGITS[slot])
                tokens.append(_SLOT_DIGITS[slot])
                continue
            token, function = operators[int(draw() * len(operators))]
            tokens.append(token)
            arguments = 2 + int(draw() * (rules.max_args - 1))
            values.append(function(nodes(arguments, depth + 1)))
            tokens.append(close)
            if len(tokens) > most:
                raise _TooLongError

        return values

    fruitless = 0
    while fruitless < MAX_FRUITLESS_TRIES:
        tokens.clear()
        fruitless += 1
        with suppress(_TooLongError):
            (value,) = nodes(1, 1)
            if len(tokens) > rules.min_length:
                fruitless = 0
                yield bytes(tokens), value
    raise ConfigError(
        f"listops: no expression within the bounds in {MAX_FRUITLESS_TRIES} draws of {rules};"
        " lower min_length, or raise max_length, max_depth or max_args"
    )


RULES: Mapping[str, ListOpsRules] = {
    "short": ListOpsRules(max_depth=4, max_args=5, min_length=5, max_length=50),
    "lra": ListOpsRules(max_depth=10, max_args=10, min_length=500, max_length=2000),
}
SIZES: Mapping[str, Mapping[Split, int]] = {
    "short": {"train": 20000, "valid": 1000, "test": 1000},
    "lra": {"train": 96000, "valid": 2000, "test": 2000},
}


@dataclass(frozen=True)
class ListOpsOptions(DrawnOptions):
    """Options of the task `listops`."""

    data: str = "builtin"
    """builtin (generated), a tsv, csv or jsonl file of labels and expressions, a folder, or hf:name[:config]."""
    setting: Literal["short", "lra"] = "short"
    """short: 6 to 49 tokens; 20000, 1000 and 1000 generated expressions. lra (Long Range Arena): 501 to 1999
    tokens; 96000, 2000 and 2000."""
    max_depth: int | None = None
    """Digits stand at this depth at most; 4 (short) or 10 (lra)."""
    max_args: int | None = None
    """Most arguments of an operator; 5 (short) or 10 (lra)."""
    min_length: int | None = None
    """Generated expressions have more tokens than this; 5 (short) or 500 (lra)."""
    max_length: int | None = None
    """Generated expressions have fewer tokens than this; 50 (short) or 2000 (lra). In a file: most tokens of one."""
    drawn: ClassVar[str] = f"max_depth max_args min_length {DrawnOptions.drawn}"


@register_task(
    "listops", ListOpsOptions, "the value of a nested list expression, ten classes (accuracy)"
)
class ListOpsTask(ClassificationTask):
    """Ten-way classification of ListOps expressions by their value.

    Expressions have the Long Range Arena's form, without parentheses; generated splits share none.
    Malformed expressions and wrong labels of files are a `DataError` with file:line. Source: Nangia
    and Bowman 2018; generator of Tay et al. 2021. Cost: 0.25 s (short); a minute on one core (lra).

    >>> from wellposed_lab.tasks.task import build_task
    >>> task = build_task("listops", {"num_train": 100, "num_valid": 10, "num_test": 10})
    >>> example = task.dataset("train")[0]
    >>> task.tokenizer.decode(example["input_ids"]), example["labels"]
    ('[MED 7 4 [MAX 3 2 6 4 9 ] ]', [7])
    """

    def __init__(self, options: ListOpsOptions) -> None:
        self.options = options
        encoder = WordEncoder(VOCABULARY, drop=PARENTHESES)
        generated = options.data == "builtin"
        examples, source = _generate(options) if generated else _read(options, encoder)
        described = source | {"form": "Long Range Arena: parentheses removed"}
        super().__init__(encoder=encoder, examples=examples, labels=DIGITS, described=described)


Examples: TypeAlias = dict[Split, LabelledExamples]


def _generate(options: ListOpsOptions) -> tuple[Examples, Described]:
    bounds = ("max_depth", "max_args", "min_length", "max_length")
    rules = replace(RULES[options.setting], **splits.given_options(options, bounds))
    counts = options.counts(SIZES[options.setting])
    seed = options.data_seed or 0
    draw = partial(next, draw_expressions(rules, seed=seed))
    drawn = draw_distinct(
        draw,
        sum(counts.values()),
        MAX_FRUITLESS_TRIES,
        f"listops: {rules} allow too few different expressions",
        "raise max_length, max_depth or max_args",
    )
    written = b"\n".join(b"%d %s" % (value, text.hex().encode()) for text, value in drawn)
    left = iter(drawn)
    examples = Examples()
    for split, count in counts.items():
        texts, values = zip(*itertools.islice(left, count), strict=True)
        flat = np.frombuffer(b"".join(texts), dtype=np.uint8) + np.uint8(NUM_SPECIAL)
        labels = np.array(values, dtype=np.int64)
        examples[split] = LabelledExamples(Ragged(flat, list(map(len, texts))), labels)

    source = f"generated by the Long Range Arena rules, setting {options.setting}"
    digest = hashlib.sha256(written).hexdigest()
    drawn_by = {**asdict(rules), "operators": list(GENERATED_OPERATORS)}
    return examples, drawn_facts(source, GENERATOR_VERSION, seed, digest, rules=drawn_by)


def _read(options: ListOpsOptions, encoder: WordEncoder) -> tuple[Examples, Described]:
    tables, described = load_labelled(options)
    problems = [problem for split in SPLITS for problem in _wrong_rows(tables[split])]
    files.refuse(f"{len(problems)} rows that are not label and expression; mend them", problems)
    examples: Examples = {}
    for split in SPLITS:
        encoded = encoder.encode(tables[split].texts)
        if options.max_length is not None:
            remedy = "raise max_length, or leave it out"
            refuse_longer(tables[split], encoded.full_lengths, options.max_length, remedy)
        labels = np.array([int(label) for label in tables[split].labels], dtype=np.int64)
        examples[split] = LabelledExamples(encoded.ids, labels)
    checked = {"labels_checked": "every label equals the value of its expression"}

    return examples, described | checked


def _wrong_rows(table: LabelledTexts) -> list[str]:
    """Return one problem for each malformed expression or wrong label."""
    return [
        f"{table.where(index)}: {problem}"
        for index, (text, label) in enumerate(zip(table.texts, table.labels, strict=True))
        if (problem := _problem(text.replace("(", " ( ").replace(")", " ) ").split(), label))
    ]


def _problem(tokens: Sequence[str], label: str) -> str | None:
    opened = tokens.count("(")
    closed = tokens.count(")")
    if opened != closed:
        return f"{opened} '(' and {closed} ')'"
    try:
        value = evaluate([token for token in tokens if token not in PARENTHESES])
    except ValueError as error:
        return f"malformed expression: {error} (parentheses not counted)"
    right = label == str(value)
    return None if right else f"label {label!r}, but the expression has the value {value}"
