"""The help of options is the docstring below each field."""

import dataclasses

import pytest

from wellposed_lab.cli.option_help import help_of
from wellposed_lab.tasks.task import TASKS
from wellposed_lab.training.config import TrainOptions


@dataclasses.dataclass
class Base:
    """A class."""

    first: int
    """One
    line."""
    second: int = 0
    third: int = 0
    "Third."


@dataclasses.dataclass
class Derived(Base):
    second: int = 1
    """Now with a text."""
    third: int = 2

    @dataclasses.dataclass
    class Inner:
        word: str = ""
        """Inside."""


def test_texts_are_below_the_fields_of_a_class_and_its_bases():
    assert help_of(Base) == {"first": "One line.", "third": "Third."}
    assert help_of(Derived) == {
        "first": "One line.",
        "second": "Now with a text.",
        "third": "Third.",
    }
    assert help_of(Derived.Inner) == {"word": "Inside."}


def test_a_class_in_a_function_has_its_texts():
    class Local:
        word: str = ""
        """Here."""

    assert help_of(Local) == {"word": "Here."}


def test_a_class_without_source_has_none():
    made = dataclasses.make_dataclass("Made", ["word"])
    made.__module__ = "nowhere"
    assert help_of(made) == {}
    assert help_of(int) == {}


@pytest.mark.parametrize("options", [TrainOptions, *(TASKS.get(name).options for name in TASKS)])
def test_every_option_has_a_text(options):
    texts = help_of(options)
    assert [item.name for item in dataclasses.fields(options) if not texts.get(item.name)] == []
