"""What the values of an options class must be, said beside each field; free of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import Field, field
from typing import Any, TypeVar

T = TypeVar("T")

Check = tuple[str, Callable[[Any], bool]]
"""What is expected of a value, in words, and whether a value is that."""


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_size(value: object) -> bool:
    """Return whether ``value`` is an integer of at least 1.

    >>> is_size(3), is_size(0), is_size(True)
    (True, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def one_of(*values: object) -> Check:
    """Return the check for one of ``values``.

    >>> one_of("tok", "inf", "2")[0]
    "'tok', 'inf' or '2'"
    """
    words = [repr(value) for value in values]
    return (
        f"{', '.join(words[:-1])} or {words[-1]}",
        lambda value: value in values and not isinstance(value, bool),
    )


COUNT: Check = (
    "an integer >= 0",
    lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0,
)
ABOVE_ONE: Check = ("a finite number > 1", lambda value: _is_number(value) and 1 < value < math.inf)
SIZE: Check = ("an integer >= 1", is_size)
RATE: Check = ("a number in [0, 1)", lambda value: _is_number(value) and 0 <= value < 1)
INSIDE_0_1: Check = ("a number in (0, 1)", lambda value: _is_number(value) and 0 < value < 1)
POSITIVE: Check = ("a finite number > 0", lambda value: _is_number(value) and 0 < value < math.inf)


def option(default: T, check: Check, *, neutral: object = None) -> T:
    """Return a dataclass field whose value is checked.

    Args:
        default: its default; where that is None, None needs no check.
        check: what its values must be.
        neutral: a value that asks for nothing, beside the default, of a model that does not read
        the option.
    """
    return field(default=default, metadata={"check": check, "neutral": neutral})


def out_of_range(values: object, items: Collection[Field[Any]]) -> Iterator[tuple[str, Any, str]]:
    """Yield name, value and what was expected, for each of the fields ``items`` that fails its
    check."""
    for item in items:
        expected, holds = item.metadata.get("check", ("", lambda _: True))
        value = getattr(
            values, item.name, item.default
        )  # it may be declared later than ``values`` was made
        if not (holds(value) or (value is None and item.default is None)):
            yield item.name, value, expected
