"""The exception family: every error is ours, and callers can catch the standard type too."""

import pytest

from wellposed import errors
from wellposed.errors import WellposedError, listed, unknown_name
from wellposed.registry import Registry

RUNTIME = {"ConvergenceError", "CheckpointError", "UnsoundBoundError"}


def test_every_error_is_ours_and_standard():
    ours = {name: kind for name, kind in vars(errors).items() if name.endswith("Error")}
    assert len(ours) >= 9
    for name, kind in ours.items():
        assert issubclass(kind, WellposedError)
        standard = RuntimeError if name in RUNTIME else ValueError
        assert kind is WellposedError or issubclass(kind, standard)


def test_unknown_name_lists_near_names_or_all_where_none_is_near():
    registered = ["oc1", "oc2", "oc3", "oc4", "post_ln", "zzz"]
    near = {"post_nl": "nearest: post_ln", "oc9": "nearest: oc4, oc3, oc2"}
    for name, hint in {**near, "qqqqq": f"expected one of {', '.join(registered)}"}.items():
        assert str(unknown_name("variant", name, registered)) == f"unknown variant '{name}'; {hint}"
    assert "no task is registered" in str(unknown_name("task", "x", []))


@pytest.mark.parametrize("value", ["{x}", "'{x}'", '"{x}"', "it's '{x}'", "'{b}'", '"it\'s {b}"'])
def test_values_are_cut_at_200_characters_and_sentences_are_not(value):
    message = f"received {value.format(x='x' * 5000, b='a blank ' * 900)}"
    assert len(str(WellposedError(message))) <= 225
    sentence = "Python's own words, " * 30 + "the user's 'value' " * 30
    assert str(WellposedError(sentence)) == sentence


def test_listed_counts_what_it_leaves_out():
    text = listed([f"row {number}" for number in range(25)])
    assert text.count("\n") == 10
    assert text.endswith("... and 15 more")


def test_registry_refuses_a_second_entry():
    table = Registry("number")
    table.register("one")(1)
    with pytest.raises(errors.ConfigError, match="registered twice"):
        table.register("one")(2)
    assert "one" in table
    assert list(table) == ["one"] == list(table.names())
