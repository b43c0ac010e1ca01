"""The parser of every command: words are read by the hints of dataclasses, as files are; tyro shows the
help, with the most used options first."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, cast, get_args, get_origin

import tyro
from docstring_parser import parse_from_object

from wellposed import options
from wellposed.errors import ConfigError, unknown_name

Arguments = TypeVar("Arguments")
ImportedFiles: TypeAlias = Annotated[
    tuple[Path, ...], tyro.conf.arg(name="import", metavar="FILE.py"), tyro.conf.UseAppendAction
]
"""The option ``--import FILE.py``: code of the user's own, which `main` runs first."""
Flat = tyro.conf.arg(name="")
HELP, HELP_ALL, COMPLETION = frozenset({"-h", "--help"}), "--help-all", "--tyro-"
OTHER_SPELLINGS = {
    "--lr": "--learning-rate",
    "--bs": "--batch-size",
    "--max-steps": "--steps",
    "--num-steps": "--steps",
    "--num-epochs": "--epochs",
    "--num-train-epochs": "--epochs",
    "--wd": "--weight-decay",
    "--output-dir": "--out",
    "--model": "--from",
    "--accum": "--gradient-accumulation",
    "--bf16": "--precision bf16",
    "--fp16": "--precision bf16",
    "--layers": "--model.num-hidden-layers",
    "--hidden-size": "--model.hidden-size",
}
"""What people type who come from elsewhere -> the option of `train` and `compare`."""


def parse_words(
    arguments: type[Arguments],
    words: Sequence[str],
    *,
    prog: str,
    description: str | None = None,
    values: Mapping[str, Any] | None = None,
    common: Collection[str] = (),
) -> Arguments:
    """Return the options among the words of a command.

    Args:
        arguments: dataclass of the options; its docstrings are their help.
        words: what followed the command's name.
        prog: the command, as usage and messages print it.
        description: the first lines of the help; the docstring of ``arguments`` if not given.
        values: those of options that are not among the words, with a table for each section.
        common: dotted names of the options that ``--help`` shows, ``--help-all`` shows all; empty:
            both show all.

    Raises:
        ConfigError: an unknown option, one without its value, missing ones, or all values that
            their hints or classes refuse.
    """
    values = values or {}
    completes = any(word.startswith(COMPLETION) for word in words)
    if completes or {*words} & {*HELP, HELP_ALL}:
        shown = common if common and {*words} & HELP else None
        if shown:
            more = f"The most used options; `{prog} {HELP_ALL}` lists all."
            description = f"{description or ''}\n\n{more}"
        asked = words if completes else ["--help"]
        tyro.cli(_shown(arguments, values, shown), args=asked, prog=prog, description=description)
    where, read = prog.removeprefix("wellposed "), _read(arguments, words, values, prog)
    parsed = options.build_options(arguments, read, where=where, titled=False)
    if getattr(getattr(parsed, "command", parsed), "quiet", False):
        logging.getLogger("wellposed").setLevel(logging.WARNING)  # `main` puts it back
    return parsed


def _read(
    arguments: type[Any], words: Sequence[str], values: Mapping[str, Any], prog: str
) -> dict[str, Any]:
    """Return ``values`` with those of the words in their place."""
    reader = argparse.ArgumentParser(
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
    )
    declared = list(_declare(reader, arguments))
    known = {word: action for action, _ in declared for word in action.option_strings}
    spelled: list[str] = []
    for word in words:
        before = known.get(spelled[-1]) if spelled else None
        if before is not None and before.const is None and _dashed(word) not in known:
            spelled[-1] += f"={word}"  # argparse takes a word that begins with - for an option
        else:
            spelled.append(_dashed(word))
    read: dict[str, Any] = {name: dict(table) for name, table in values.items()}
    try:
        given, rest = reader.parse_known_intermixed_args(spelled)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{prog}: {error.argument_name}: {error.message}") from None
    if rest:
        near = [word for word, action in known.items() if action.const is not False]
        error = unknown_name(f"option of {prog}", rest[0].partition("=")[0], near)
        raise ConfigError(f"{error}; see {HELP_ALL}")
    for place, value in vars(given).items():
        section, _, name = place.rpartition(".")
        table = read.setdefault(section, {}) if section else read
        table[name] = tuple(value) if isinstance(value, list) else value
    missing = [
        f"{''.join(action.option_strings) or action.dest} is missing: {action.help}"
        for action, needed in declared
        if needed and action.dest not in options.flat_options(read)
    ]
    if missing:
        raise ConfigError(f"{prog}: {'; '.join(missing)}")
    return read


def _declare(
    reader: argparse.ArgumentParser, cls: type[Any], section: str = "", start: str = "--"
) -> Iterator[tuple[argparse.Action, bool]]:
    """Let ``reader`` know the options of ``cls``; yield each, and whether it has no default."""
    needed, help_of = options.required(cls), _help_of(cls)
    for name, hint in options.checked_hints(cls).items():
        kind, marks = options.unwrapped(hint)
        respelled = (getattr(mark, "name", None) for mark in marks)
        word = next((each for each in respelled if each is not None), name).replace("_", "-")
        settings: dict[str, Any] = {"dest": f"{section}{name}", "help": help_of.get(name)}
        if dataclasses.is_dataclass(kind):
            inside = start if Flat in marks else f"--{word}."
            yield from _declare(reader, cast(type, kind), f"{name}.", inside)
            continue
        several = get_origin(kind) is tuple
        if kind is bool:
            off = {**settings, "action": "store_const", "const": False}
            yield reader.add_argument(f"{start}no-{word}", **off), False
            settings |= {"action": "store_const", "const": True}
        else:
            settings["type"] = partial(
                options.read_word, hint=get_args(kind)[0] if several else hint
            )
        if tyro.conf.Positional in marks:
            settings["nargs"] = "*" if several else "?"
            yield reader.add_argument(settings.pop("dest"), **settings), name in needed
        else:
            settings |= {"action": "append"} if several else {}
            yield reader.add_argument(f"{start}{word}", **settings), name in needed


def _dashed(word: str) -> str:
    """Return a word with ``-`` for ``_`` in the name of an option."""
    name, equals, text = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{text}" if name.startswith("--") else word


@dataclass(frozen=True)
class ModelArguments(options.CheckedOptions):
    """The model that a command reads, and code of the user's own that it needs."""

    model: Annotated[str, tyro.conf.arg(metavar="MODEL"), tyro.conf.Positional] = ""
    """A run folder, a saved Hugging Face model, a config.json (random weights) or a hub name; also as --from MODEL."""
    source: Annotated[str, tyro.conf.arg(name="from", metavar="MODEL")] = ""
    """The same."""
    imports: ImportedFiles = ()
    """Run this Python file first, where the run was made with it: no folder runs code of its own accord."""


Model = TypeVar("Model", bound=ModelArguments)


def parse_with_model(arguments: type[Model], command: str, words: Sequence[str]) -> Model:
    """Return the options of a command that reads a model, which is then in ``model``.

    Raises:
        ConfigError: no model is named, or two.
    """
    parsed = parse_words(arguments, words, prog=f"wellposed {command}")
    if bool(parsed.model) == bool(parsed.source):
        raise ConfigError(
            f"wellposed {command}: give a model, as the first word or with --from: a folder, a"
            " config.json or a hub name"
        )
    return dataclasses.replace(parsed, model=parsed.model or parsed.source, source="")


def _shown(
    cls: type[Any], values: Mapping[str, Any], shown: Collection[str] | None, prefix: str = ""
) -> type[Any]:
    """Return a dataclass for a help text: each option's docstring as one paragraph, no default that
    says nothing, and of the options that may be left out those with a dotted name in ``shown``
    (None: all)."""
    hints, help_of, lines = options.checked_hints(cls), _help_of(cls), []
    for item in dataclasses.fields(cls):
        hint, path = hints[item.name], f"{prefix}{item.name}"
        kind, marks = options.unwrapped(hint)
        if dataclasses.is_dataclass(kind):
            below = prefix if Flat in marks else f"{path}."
            inside = _shown(cast(type, kind), values.get(item.name, {}), shown, below)
            lines.append((item.name, Annotated[(inside, *marks)] if marks else inside))
            continue
        value = values.get(item.name, item.default)
        needed = value is dataclasses.MISSING
        if shown is not None and path not in shown and not needed:
            hint = Annotated[hint, tyro.conf.Suppress]
        says = None if needed or not (value is None or value is False or value == "") else ""
        about = tyro.conf.arg(
            help=help_of.get(item.name), help_behavior_hint=says, metavar=_metavar(kind)
        )
        default = field() if needed else field(default=value)
        lines.append((item.name, Annotated[hint, about], default))
    made = dataclasses.make_dataclass(cls.__name__, lines, kw_only=True)
    made.__doc__ = cls.__doc__
    return made


def _metavar(kind: Any) -> str | None:
    """Return FLOAT|STR for ``float | str | None``, which tyro shows as {None}|FLOAT|STR."""
    kinds = [options.unwrapped(each)[0] for each in get_args(kind)]
    if not (type(None) in kinds and {*kinds} <= {int, float, str, Path, type(None)}):
        return None
    return "|".join(each.__name__.upper() for each in kinds if each is not type(None))


def _help_of(cls: type[Any]) -> dict[str, str]:
    """Return the docstring below each option of a dataclass, as one line."""
    bases = reversed(cls.__mro__[:-1])
    found = [each for base in bases for each in parse_from_object(base).params]
    return {each.arg_name: " ".join((each.description or "").split()) for each in found}
