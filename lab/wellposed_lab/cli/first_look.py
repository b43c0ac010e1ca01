"""Reads a few options before the rest is parsed, since they decide the defaults of the others."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from wellposed.errors import ConfigError

Names = Iterable[str]


def first_look(
    words: Sequence[str], values: Names = (), flags: Names = (), *, many: Names = ()
) -> tuple[dict[str, Any], list[str]]:
    """Return what some options say, the last value or None, whether a flag is given, and the rest.

    Args:
        words: what followed the command's name; all other options are passed over.
        values: names of options that take a value.
        flags: names of options that take none, or are given as ``--no-NAME``.
        many: names of options that may be given several times, each with a value.

    Raises:
        ConfigError: an option without its value.

    >>> first_look(["--steps", "3", "--from=x", "--fast"], ["from", "out"], ["fast"])
    ({'from': 'x', 'out': None, 'fast': True}, ['--steps', '3'])

    As for the parser of a command, ``_`` in a name is ``-``:

    >>> first_look(["--from_scratch", "--no-fast"], flags=["from-scratch", "fast"])
    ({'from-scratch': True, 'fast': False}, [])
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    values, flag = tuple(values), {"action": argparse.BooleanOptionalAction, "default": False}
    kinds: list[tuple[Names, dict[str, Any]]] = [(values, {}), (flags, flag)]
    for names, how in (*kinds, (many, {"action": "append", "default": []})):
        for name in names:
            spellings = dict.fromkeys([f"--{name}", f"--{name.replace('-', '_')}"])
            parser.add_argument(*spellings, dest=name, **how)
    try:
        found, rest = parser.parse_known_args(list(words))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name}: {error.message}, a value after it") from None
    empty = [f"--{name}" for name in values if vars(found)[name] == ""]
    if empty:
        raise ConfigError(f"{', '.join(empty)}: expected a value, received none")
    return vars(found), rest
