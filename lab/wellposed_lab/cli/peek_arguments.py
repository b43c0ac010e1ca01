"""Read the options of `wellposed` itself: those of its commands may be registered by ``--import``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from wellposed.errors import ConfigError


def peek_arguments(
    words: Sequence[str], *, flags: Iterable[str] = (), many: Iterable[str] = ()
) -> dict[str, Any]:
    """Return some options: of flags True or False, of the others the list of their values.

    Args:
        words: All words.
        flags: Names of options without a value, also as ``--no-NAME``.
        many: Names of options that may be repeated, each with a value; without it they are a
            `ConfigError`.

    >>> peek_arguments(["train", "--import", "a.py", "--debug"], flags=["debug"], many=["import"])
    {'debug': True, 'import': ['a.py']}
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in flags:
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=False)
    for name in many:
        parser.add_argument(f"--{name}", action="append", default=[])
    try:
        parsed, _ = parser.parse_known_args(list(words))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name}: {error.message}, a value after it") from None
    return vars(parsed)
