"""Plain values against options classes: one rule for Python calls, files and the command line."""

import math
from dataclasses import dataclass, field
from typing import Literal

import pytest

from wellposed import options
from wellposed.errors import ConfigError


@dataclass(frozen=True)
class Bounded(options.CheckedOptions):
    value: options.Size = 1
    share: options.Rate | None = None
    size: Literal["small", "large"] | None = None
    level: Literal[1, 2] | float = 1
    wide: bool = False
    names: dict[str, int] = field(default_factory=dict)

    def problems(self):
        return ["value = 7 with share, expected another"] if self.value == 7 and self.share else []


SHARE = "a finite number >= 0 and < 1 or None"
SIZE = "'small', 'large' or None"
WRONG = [
    ({"value": 2**63}, f"value = {2**63}, expected an integer >= 1"),
    ({"value": True}, "value = True, expected an integer >= 1"),
    ({"value": 1.0}, "value = 1.0, expected an integer >= 1"),
    ({"share": math.nan}, f"share = nan, expected {SHARE}"),
    ({"share": math.inf}, f"share = inf, expected {SHARE}"),
    ({"share": 10**400}, f"expected {SHARE}"),
    ({"share": 1.0}, f"share = 1.0, expected {SHARE}"),
    ({"size": "huge"}, f"size = 'huge', expected {SIZE}"),
    ({"size": True}, f"size = True, expected {SIZE}"),
    ({"level": True}, "level = True, expected 1, 2 or a finite number"),
    ({"wide": 1}, "wide = 1, expected true or false"),
    ({"names": "a"}, "names = 'a', expected a table"),
    ({"value": 7, "share": 0.5}, "value = 7 with share, expected another"),
]


@pytest.mark.parametrize(("values", "line"), WRONG)
def test_a_value_is_refused_alike_in_python_and_in_a_file(values, line):
    with pytest.raises(options.OptionsError) as in_python:
        Bounded(**values)
    with pytest.raises(options.OptionsError) as in_file:
        options.build_options(Bounded, values, where="x")
    assert line in in_python.value.problems[0]
    assert in_file.value.problems == [f"x: {problem}" for problem in in_python.value.problems]


def test_what_fits_is_taken():
    assert Bounded(2**63 - 1, 0).share == 0
    values = {"size": "small", "level": 0.5, "wide": True, "names": {"a": 1}}
    assert vars(options.build_options(Bounded, values, where="x")).items() >= values.items()


@pytest.mark.parametrize(
    ("word", "hint", "value"),
    [
        ("3", options.Size, 3),
        ("3", options.Rate, 3.0),
        ("2", Literal[1, 2], 2),
        ("None", str | None, None),
        ("None", str, "None"),
        ("rms:2", float | str, "rms:2"),
        ("many", options.Size, "many"),
        ("ab", list[str], "ab"),
    ],
)
def test_a_word_becomes_the_value_that_its_hint_allows_or_stays_a_word(word, hint, value):
    assert options.read_word(word, hint) == value
    assert type(options.read_word(word, hint)) is type(value)


@dataclass(frozen=True)
class Outer:
    name: str
    bounded: Bounded = field(default_factory=Bounded)


def test_tables_are_built_and_every_problem_of_every_table_is_named():
    built = options.build_options(Outer, {"name": "a", "bounded": {"value": 2}}, where="x")
    assert built == Outer("a", Bounded(2))
    wrong = {"nome": "a", "bounded": {"size": "huge", "valu": 1}}
    with pytest.raises(options.OptionsError) as caught:
        options.build_options(Outer, wrong, where="x")
    assert caught.value.problems == [
        "x: [bounded]: unknown option 'valu'; nearest: value",
        f"x: [bounded]: size = 'huge', expected {SIZE}",
        "x: unknown option 'nome'; nearest: name",
        "x: option 'name' is missing",
    ]
    with pytest.raises(ConfigError, match=r"x: bounded = 3, expected a table of options"):
        options.build_options(Outer, {"name": "a", "bounded": 3}, where="x")


def test_nested_options_are_flattened_with_dotted_names():
    assert options.flat_options({"a": {"b": {"c": 1}, "d": 2}, "e": 3}) == {
        "a.b.c": 1,
        "a.d": 2,
        "e": 3,
    }
