"""Checks of option values that several tasks share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from wellposed.errors import ConfigError


def require_positive(task: str, options: Any, *names: str) -> None:
    """Raise `ConfigError` naming every one of the named options that is given and below 1."""
    wrong = [
        f"{name} = {value}" for name, value in given_options(options, names).items() if value < 1
    ]
    if wrong:
        raise ConfigError(f"{task}: {', '.join(wrong)}; expected at least 1")


def given_options(options: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of those of the named options that are not None."""
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def refuse_options(task: str, options: Any, names: Iterable[str], reason: str) -> None:
    """Raise `ConfigError` where one of the named options is given, though it would not be read."""
    given = given_options(options, names)
    if given:
        raise ConfigError(f"{task}: {', '.join(given)} {reason}")
