"""The exception family: every error is ours, and callers can catch the standard type too."""

from __future__ import annotations

import pytest

from wellposed import errors
from wellposed.errors import WellposedError, listed, missing_extra, nearest_names, unknown_name
from wellposed.registry import Registry

FAMILY = {
    "RoleNotFoundError": ValueError,
    "ShapeError": ValueError,
    "NotLipschitzError": ValueError,
    "NotContractiveError": ValueError,
    "ConvergenceError": RuntimeError,
    "DataError": ValueError,
    "ConfigError": ValueError,
    "CheckpointError": RuntimeError,
}


@pytest.mark.parametrize(("name", "standard"), FAMILY.items())
def test_every_error_is_ours_and_standard(name: str, standard: type[Exception]) -> None:
    error = getattr(errors, name)
    assert issubclass(error, WellposedError)
    assert issubclass(error, standard)


def test_unknown_name_lists_the_nearest_three() -> None:
    message = str(unknown_name("variant", "post_nl", ["zzz", "post_ln", "pre_ln", "oc1", "oc2"]))
    assert message.startswith("unknown variant 'post_nl'; nearest: post_ln, pre_ln, oc")
    assert message.count(",") == 2
    assert "no task is registered" in str(unknown_name("task", "x", []))


def test_nearest_names_is_never_empty_for_known_names() -> None:
    assert nearest_names("qqq", ["a", "b"]) != []


def test_listed_counts_what_it_leaves_out() -> None:
    text = listed([f"row {number}" for number in range(25)])
    assert text.count("\n") == 10
    assert text.endswith("... and 15 more")


def test_missing_extra_gives_the_command() -> None:
    assert "pip install 'wellposed[report]'" in str(missing_extra("jinja2", "report", "reports"))


def test_registry_refuses_a_second_entry() -> None:
    table: Registry[int] = Registry("number")
    table.register("one")(1)
    with pytest.raises(errors.ConfigError, match="registered twice"):
        table.register("one")(2)
    assert "one" in table
    assert list(table) == ["one"] == list(table.names())
