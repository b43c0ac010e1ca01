"""The model that a command reads: its first word, or what follows ``--from`` as in ``train`` and
``compare``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import tyro

from wellposed.cli.parser import parse_words
from wellposed.errors import ConfigError

ModelName: TypeAlias = Annotated[str, tyro.conf.arg(metavar="MODEL"), tyro.conf.Positional]


def parse_with_model(
    arguments: type, command: str, words: Sequence[str], description: str | None = None
) -> Any:
    """Parse the options of a command whose first argument is a `ModelName`; ``--from MODEL`` gives
    it too.

    Raises:
        ConfigError: ``--from`` without a value.
    """
    words = list(words)
    for place, word in enumerate(words):
        if word == "--from" and place + 1 == len(words):
            raise ConfigError(
                f"wellposed {command}: --from names no model; give a folder, a config.json or a hub"
                " name"
            )
        if word == "--from":
            words = [words[place + 1], *words[:place], *words[place + 2 :]]
        elif word.startswith("--from="):
            words = [word.removeprefix("--from="), *words[:place], *words[place + 1 :]]
        else:
            continue
        break
    return parse_words(arguments, words, prog=f"wellposed {command}", description=description)
