"""Plain values against options classes: one rule of types for run configurations and for tasks."""

import math
from dataclasses import dataclass
from typing import Literal

import pytest

from wellposed.errors import ConfigError
from wellposed.options import (
    CheckedOptions,
    OptionsError,
    Rate,
    Size,
    build_options,
    flat_options,
    option_problems,
)


@dataclass(frozen=True)
class Sized:
    size: Literal["small", "large"] | None = None
    level: Literal[1, 2] | float = 1
    wide: bool = False


@dataclass(frozen=True)
class Bounded(CheckedOptions):
    value: Size = 1
    share: Rate | None = None

    def problems(self):
        return ["value = 7 with share, expected another"] if self.value == 7 and self.share else []


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"size": None, "level": 2, "wide": True}, None),
        ({"size": "small", "level": 0.5}, None),
        ({"size": "huge"}, "size = 'huge', expected 'small', 'large' or None"),
        ({"size": True}, "size = True, expected 'small', 'large' or None"),
        ({"level": True}, "level = True, expected 1, 2 or a finite number"),
        ({"wide": 1}, "wide = 1, expected true or false"),
    ],
)
def test_types_of_options(values, expected):
    found = option_problems(Sized, values, where="x")
    assert found == ([] if expected is None else [f"x: {expected}"])


def test_generic_types_are_looked_at_from_outside():
    @dataclass
    class Held:
        names: dict[str, int]

    assert option_problems(Held, {"names": {"a": 1}}, where="x") == []
    assert option_problems(Held, {"names": "a"}, where="x") == ["x: names = 'a', expected a table"]
    assert option_problems(Held, {}, where="x") == ["x: option 'names' is missing"]


@dataclass(frozen=True)
class Outer:
    name: str
    sized: Sized = Sized()
    bounded: Bounded = Bounded()


def test_tables_are_built_and_every_problem_of_every_table_is_named():
    values = {"name": "a", "sized": {"wide": True}, "bounded": {"value": 2}}
    built = build_options(Outer, values, where="x")
    assert built == Outer("a", Sized(wide=True), Bounded(2))
    wrong = {"nome": "a", "sized": {"size": "huge", "widee": 1}, "bounded": {"value": 0}}
    with pytest.raises(OptionsError) as caught:
        build_options(Outer, wrong, where="x")
    assert caught.value.problems == [
        "x: [sized]: unknown option 'widee'; nearest: wide",
        "x: [sized]: size = 'huge', expected 'small', 'large' or None",
        "x: [bounded]: value = 0, expected an integer >= 1",
        "x: unknown option 'nome'; nearest: name",
        "x: option 'name' is missing",
    ]
    with pytest.raises(ConfigError, match=r"x: sized = 3, expected a table of options"):
        build_options(Outer, {"name": "a", "sized": 3}, where="x")


def test_nested_options_are_flattened_with_dotted_names():
    assert flat_options({"a": {"b": {"c": 1}, "d": 2}, "e": 3}) == {"a.b.c": 1, "a.d": 2, "e": 3}


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"value": 2**63}, f"value = {2**63}, expected an integer >= 1"),
        ({"value": True}, "value = True, expected an integer >= 1"),
        ({"value": 1.0}, "value = 1.0, expected an integer >= 1"),
        ({"share": math.nan}, "share = nan, expected a finite number >= 0 and < 1 or None"),
        ({"share": math.inf}, "share = inf, expected a finite number >= 0 and < 1 or None"),
        ({"share": 10**400}, "expected a finite number >= 0 and < 1 or None"),
        ({"share": 1.0}, "share = 1.0, expected a finite number >= 0 and < 1 or None"),
        ({"value": 7, "share": 0.5}, "value = 7 with share, expected another"),
    ],
)
def test_a_value_is_refused_alike_in_python_and_in_a_file(values, line):
    with pytest.raises(OptionsError) as in_python:
        Bounded(**values)
    with pytest.raises(OptionsError) as in_file:
        build_options(Bounded, values, where="x")
    assert line in in_python.value.problems[0]
    assert in_file.value.problems == [f"x: {problem}" for problem in in_python.value.problems]


def test_what_fits_is_taken():
    assert Bounded(2**63 - 1, 0).share == 0
    assert Bounded(7).problems() == []
