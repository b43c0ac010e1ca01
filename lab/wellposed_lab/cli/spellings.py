"""The ways to write an option: today's name for one of before, ``_`` for ``-``, and no section."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from wellposed.errors import ConfigError


@dataclass(frozen=True)
class DeclaredOption:
    """An option as argparse has it."""

    action: argparse.Action
    is_required: bool
    section: str
    """The word of its section with a dot, as ``model.``; empty for one without."""
    has_short_name: bool

    @property
    def names(self) -> Sequence[str]:
        return self.action.option_strings

    @property
    def label(self) -> str:
        return "".join(self.names) or self.action.dest

    def short_names(self) -> Iterator[tuple[str, str]]:
        """Yield each name without the section's, and the name itself."""
        for name in self.names:
            if self.section:
                yield name.replace(self.section, "", 1), name


class Spellings:
    """The ways to write the options of a command."""

    def __init__(
        self, declared: Sequence[DeclaredOption], prog: str, new_name: Callable[[str], str]
    ) -> None:
        self._prog = prog
        self._new_name = new_name
        self._actions = {name: option.action for option in declared for name in option.names}

        self._long_names: dict[str, list[str]] = {}
        """Names without a section, and the options that they may mean."""
        pairs = [(*pair, option) for option in declared for pair in option.short_names()]
        asked = {short for short, _, option in pairs if option.has_short_name}
        for short, name, _ in pairs:
            if short in asked and short not in self._actions:
                self._long_names.setdefault(short, []).append(name)

    def written_out(self, words: Sequence[str]) -> list[str]:
        """Return the words with the names that argparse has, and values joined to them by ``=``
        (argparse would read a value with a leading ``-`` as an option)."""
        spelled: list[str] = []
        for word in words:
            before = self._actions.get(spelled[-1]) if spelled else None
            takes_value = before is not None and before.nargs != 0
            if takes_value and not self._is_option(word):
                spelled[-1] += f"={word}"
            else:
                spelled.append(self._named(word))
        return spelled

    def _is_option(self, word: str) -> bool:
        name = _dashed(self._new_name(word))
        return name in self._actions or name in self._long_names

    def _named(self, word: str) -> str:
        """Return a word with the whole name of its option."""
        word = _dashed(self._new_name(word))
        name, equals, value = word.partition("=")
        meant = self._long_names.get(name, [name])
        if len(meant) > 1:
            raise ConfigError(
                f"{self._prog}: {name} may mean {' or '.join(meant)}; write one of them"
            )
        return f"{meant[0]}{equals}{value}"


def _dashed(word: str) -> str:
    name, equals, text = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{text}" if name.startswith("--") else word
