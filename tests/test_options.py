"""Plain values against options classes: one rule of types for run configurations and for tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from wellposed.errors import ConfigError
from wellposed.options import option_problems
from wellposed.tasks import TASKS, TaskSpec, build_task
from wellposed.training import RunConfig


@dataclass
class Sized:
    size: Literal["small", "large"] | None = None
    level: Literal[1, 2] | float = 1
    wide: bool = False


@dataclass(frozen=True)
class SizedRun(RunConfig):
    size: Literal["small", "large"] | None = None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"size": None, "level": 2, "wide": True}, None),
        ({"size": "small", "level": 0.5}, None),
        ({"size": "huge"}, "size = 'huge', expected 'small' or 'large' or nothing"),
        ({"size": True}, "size = True, expected 'small' or 'large' or nothing"),
        ({"level": True}, "level = True, expected 1 or 2 or float"),
        ({"wide": 1}, "wide = 1, expected bool"),
    ],
)
def test_types_of_options(values: Mapping[str, Any], expected: str | None) -> None:
    assert option_problems(Sized, values, where="x") == ([] if expected is None else [f"x: {expected}"])


def test_generic_types_are_looked_at_from_outside() -> None:
    @dataclass
    class Held:
        names: dict[str, int]

    assert option_problems(Held, {"names": {"a": 1}}, where="x") == []
    assert option_problems(Held, {"names": "a"}, where="x") == ["x: names = 'a', expected dict"]
    assert option_problems(Held, {}, where="x") == ["x: option 'names' is missing"]


def test_a_run_may_have_an_optional_choice() -> None:
    assert SizedRun.from_dict({"task": "listops", "size": "small"}).size == "small"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="size = 'huge', expected 'small' or 'large' or nothing"):
        SizedRun.from_dict({"task": "listops", "size": "huge"})


def test_a_task_may_have_an_optional_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    built: Any = lambda options: options  # noqa: E731
    monkeypatch.setattr(TASKS, "get", lambda name: TaskSpec(name, Sized, built, "for this test"))
    made: Any = build_task("sized", {"size": "small"})
    assert made.size == "small"
    with pytest.raises(ConfigError, match="size = 'huge', expected 'small' or 'large' or nothing"):
        build_task("sized", {"size": "huge"})
