"""``wellposed --print-completion``: a shell then completes commands, tasks, options and their choices."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import fields
from io import StringIO

from wellposed.cli.parser import HELP_ALL
from wellposed.compare.variants import VARIANTS
from wellposed.errors import unknown_name
from wellposed.recipes.recipe import recipe_names
from wellposed.tasks import TASKS

_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
_SCRIPT = """_wellposed() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words=""
  case "$COMP_CWORD:${COMP_WORDS[1]}:$before:$word" in
%s
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _wellposed wellposed"""
_OPTION = re.compile(r"^\W* (--[a-z][\w.-]*)(?:, (--no-[\w.-]+))?(?: \{(.*?)\})?", re.MULTILINE)


def completion_script(shell: str, commands: Iterable[str]) -> str:
    """Return what bash or zsh runs to complete the words of ``wellposed``, made from the help texts.

    Raises:
        ConfigError: another shell.
    """
    if shell not in ("bash", "zsh"):
        raise unknown_name("shell", shell, ["bash", "zsh"])
    first = {"1:*": [*commands, "--help", "--version", "--print-completion"]}
    cases = [*first.items(), *(case for command in commands for case in _cases(command))]
    lines = [f'    {pattern}) words="{" ".join(words)}" ;;' for pattern, words in cases]
    return (_ZSH if shell == "zsh" else "") + _SCRIPT % "\n".join(lines)


def _cases(command: str) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield what may follow, by ``place:command:word before:word so far``."""
    trains = command in ("train", "compare")
    run = importlib.import_module(f"wellposed.cli._{command}").run
    with redirect_stdout(StringIO()) as said, suppress(SystemExit):
        run(["char_lm", HELP_ALL] if trains else [HELP_ALL])
    found = _OPTION.findall(said.getvalue())
    options = {name: None for row in found for name in row[:2] if name}
    for name, _, choices in found:
        if choices:
            yield f"*:{command}:{name}:*", choices.split(",")
    if trains:
        yield f"*:{command}:--variant*:*", VARIANTS
        names = [item.name for task in TASKS for item in fields(TASKS.get(task).options)]
        options |= dict.fromkeys(f"--{name.replace('_', '-')}" for name in names)
    yield f"*:{command}:*:-*", [*options, "--help"]
    yield f"2:{command}:*", TASKS if trains else recipe_names() if command == "reproduce" else []
