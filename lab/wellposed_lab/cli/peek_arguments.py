"""Read a few options before the others, whose defaults depend on them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from wellposed.errors import ConfigError

Names = Iterable[str]


def peek_arguments(
    words: Sequence[str], values: Names = (), flags: Names = (), *, many: Names = ()
) -> tuple[dict[str, Any], list[str]]:
    """Return some options (their last value or None; of flags True or False), and the rest.

    Args:
        words: The words after the command's name; as in its parser, ``_`` in a name is ``-``.
        values: Names of options that take a value; without it they are a `ConfigError`.
        flags: Names of options without a value, also as ``--no-NAME``.
        many: Names of options that may be repeated, each with a value.

    >>> peek_arguments(["--steps", "3", "--from=x", "--fast"], ["from", "out"], ["fast"])
    ({'from': 'x', 'out': None, 'fast': True}, ['--steps', '3'])
    >>> peek_arguments(["--from_scratch", "--no-fast"], flags=["from-scratch", "fast"])
    ({'from-scratch': True, 'fast': False}, [])
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    values = tuple(values)
    flag = {"action": argparse.BooleanOptionalAction, "default": False}
    kinds: list[tuple[Names, dict[str, Any]]] = [(values, {}), (flags, flag)]
    for names, settings in (*kinds, (many, {"action": "append", "default": []})):
        for name in names:
            spellings = dict.fromkeys([f"--{name}", f"--{name.replace('-', '_')}"])
            parser.add_argument(*spellings, dest=name, **settings)
    try:
        parsed, rest = parser.parse_known_args(list(words))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name}: {error.message}, a value after it") from None
    empty = [f"--{name}" for name in values if vars(parsed)[name] == ""]
    if empty:
        raise ConfigError(f"{', '.join(empty)}: expected a value, received none")
    return vars(parsed), rest
