"""Checks of option values that several tasks share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from wellposed.errors import ConfigError


def given_options(options: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of those of the named options that are not None."""
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def refuse_options(task: str, options: Any, names: Iterable[str], reason: str) -> None:
    """Raise `ConfigError` where one of the named options is given, though it would not be read."""
    given = given_options(options, names)
    if given:
        raise ConfigError(f"{task}: {', '.join(given)} {reason}")
