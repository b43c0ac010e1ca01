"""ListOps expressions: what they mean, and how the Long Range Arena draws them.

Source: Nangia and Bowman 2018 (the language), Tay et al. 2021 (the generator's settings and the
long lengths).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wellposed.errors import ConfigError

GENERATOR_VERSION = 1
DIGITS = tuple("0123456789")
CLOSE = "]"
PARENTHESES = "()"
_SLOTS = (
    40  # equally likely outcomes of a node: the first quarter is an operator, three are each digit
)
_OPERATOR_SLOTS = 10
_SLOT_DIGITS = [0] * _OPERATOR_SLOTS + [digit for digit in range(10) for _ in range(3)]
MAX_FRUITLESS_TRIES = 200_000


def _median(values: Sequence[int]) -> int:
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) // 2


OPERATORS: dict[str, Callable[[Sequence[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": _median,
    "[SM": lambda values: sum(values) % 10,
    "[FIRST": lambda values: values[0],
    "[LAST": lambda values: values[-1],
}
GENERATED_OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
VOCABULARY = (*DIGITS, *OPERATORS, CLOSE)


def evaluate(tokens: Sequence[str]) -> int:
    """Return the value, 0 to 9, of an expression; MED is the median rounded down, SM the sum modulo
    10.

    Raises:
        ValueError: the expression is malformed; the message says at which token.

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
            raise ValueError(
                f"token {position} is {token!r}, expected a digit, ']' or one of"
                f" {', '.join(OPERATORS)}"
            )
    if len(stack) > 1:
        raise ValueError(f"{stack[-1][0]!r} is not closed by ']'")
    values = stack[0][1]
    if len(values) != 1:
        raise ValueError(f"{len(values)} expressions, expected one")
    return values[0]


@dataclass(frozen=True)
class ListOpsRules:
    """Bounds of the generator; Long Range Arena is (10, 10, 500, 2000)."""

    max_depth: int
    """Operators nest at most max_depth - 1 deep, so that digits stand at depth max_depth at
    most."""
    max_args: int
    """An operator has 2 to max_args arguments, each count equally likely."""
    min_length: int
    """Expressions have more tokens than this, parentheses not counted."""
    max_length: int
    """Expressions have fewer tokens than this."""

    def __post_init__(self) -> None:
        problems = []
        if self.max_depth < 2:
            problems.append(f"max_depth = {self.max_depth}, expected at least 2")
        if self.max_args < 2:
            problems.append(f"max_args = {self.max_args}, expected at least 2")
        if self.max_length <= max(self.min_length, 3) + 1:
            problems.append(
                f"min_length = {self.min_length} and max_length = {self.max_length} leave no length"
                " strictly between them that an expression (4 tokens or more) can have"
            )
        if problems:
            raise ConfigError("listops cannot be generated: " + "; ".join(problems))


class _TooLongError(Exception):
    """The tree being drawn has reached the length at which it will be rejected."""


class ListOpsGenerator:
    """Draws distinct expressions: trees by the Long Range Arena's law, given that the length is
    within bounds.

    A node above max_depth is an operator with probability 1/4, else a digit; operator, digit and
    number of arguments are uniform. A tree whose length is out of bounds is drawn again (and
    abandoned as soon as it is too long, which leaves the law as it is). An expression is a
    ``bytes`` of token numbers, indices into ``VOCABULARY``. Labels are computed while the tree is
    drawn.

    >>> expression, label = ListOpsGenerator(ListOpsRules(4, 4, 5, 12), seed=1).draw()
    >>> tokens = [VOCABULARY[token] for token in expression]
    >>> 5 < len(tokens) < 12, evaluate(tokens) == label
    (True, True)
    """

    def __init__(self, rules: ListOpsRules, *, seed: int) -> None:
        self.rules = rules
        self._random = random.Random(f"listops/{GENERATOR_VERSION}/{seed}").random
        self._operators = [
            (VOCABULARY.index(name), OPERATORS[name]) for name in GENERATED_OPERATORS
        ]
        self._close = VOCABULARY.index(CLOSE)
        self._tokens: list[int] = []

    def draw(self) -> tuple[bytes, int]:
        """Draw one expression and its value."""
        for _ in range(MAX_FRUITLESS_TRIES):
            self._tokens = []
            try:
                value = self._digit_or_operator()
            except _TooLongError:
                continue
            if len(self._tokens) > self.rules.min_length:
                return bytes(self._tokens), value
        raise ConfigError(
            f"listops: no expression within the bounds in {MAX_FRUITLESS_TRIES} draws of"
            f" {self.rules}; lower min_length, or raise max_length, max_depth or max_args"
        )

    def draw_distinct(self, count: int) -> dict[bytes, int]:
        """Draw ``count`` different expressions, in order, with their values."""
        drawn: dict[bytes, int] = {}
        fruitless = 0
        while len(drawn) < count:
            expression, value = self.draw()
            fruitless = fruitless + 1 if expression in drawn else 0
            drawn[expression] = value
            if fruitless > MAX_FRUITLESS_TRIES:
                raise ConfigError(
                    f"listops: {self.rules} allow too few different expressions: {len(drawn)}"
                    f" found, {count} wanted; lower num_train, num_valid and num_test, or raise"
                    " max_length, max_depth or max_args"
                )
        return drawn

    def _digit_or_operator(self) -> int:
        """Draw a whole tree: its root is a node like any other."""
        slot = int(self._random() * _SLOTS)
        if slot < _OPERATOR_SLOTS:
            return self._operator(1)
        self._tokens.append(_SLOT_DIGITS[slot])
        return _SLOT_DIGITS[slot]

    def _operator(self, depth: int) -> int:
        """Draw an operator and its arguments; one random number decides between operator and digit,
        and which digit."""
        draw, tokens, limit = self._random, self._tokens, self.rules.max_length - 1
        token, function = self._operators[int(draw() * len(self._operators))]
        tokens.append(token)
        lowest_slot = _OPERATOR_SLOTS if depth + 1 >= self.rules.max_depth else 0
        values = []
        for _ in range(2 + int(draw() * (self.rules.max_args - 1))):
            if len(tokens) >= limit:
                raise _TooLongError
            slot = lowest_slot + int(draw() * (_SLOTS - lowest_slot))
            if slot < _OPERATOR_SLOTS:
                values.append(self._operator(depth + 1))
            else:
                values.append(_SLOT_DIGITS[slot])
                tokens.append(_SLOT_DIGITS[slot])
        tokens.append(self._close)
        if len(tokens) >= self.rules.max_length:
            raise _TooLongError
        return function(values)
