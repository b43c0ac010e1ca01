"""The parser of every command: words are read by the hints of dataclasses, as files are; argparse shows
the help, with the most used options first."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, cast, get_args, get_origin

from docstring_parser import parse_from_object

from wellposed import options
from wellposed.errors import ConfigError, unknown_name


@dataclass(frozen=True)
class Typed:
    """How an option is typed, written beside its type in ``Annotated``."""

    name: str | None = None
    """Its word, if that is not the name of the field; of a section, empty: its options need no
    ``SECTION.`` before their names."""
    metavar: str | None = None
    """What stands for its value in the help."""
    is_positional: bool = False
    """Whether it is a word without a name."""


Arguments = TypeVar("Arguments")
ImportedFiles: TypeAlias = Annotated[tuple[Path, ...], Typed("import", "FILE.py")]
"""The option ``--import FILE.py``: code of the user's own, which `main` runs first."""
Flat, Positional = Typed(""), Typed(is_positional=True)
HELP, HELP_ALL = frozenset({"-h", "--help"}), "--help-all"


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
    values, shown = values or {}, common if common and {*words} & HELP else None
    reader = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [OPTIONS]",
        description=description or arguments.__doc__,
        epilog=f"The most used options; `{prog} {HELP_ALL}` lists all." if shown else None,
        formatter_class=partial(argparse.HelpFormatter, max_help_position=32),
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
    )
    declared = list(_declare(reader, arguments, values, shown))
    if {*words} & {*HELP, HELP_ALL}:
        reader.print_help()
        raise SystemExit(0)
    where, read = prog.removeprefix("wellposed "), _read(reader, declared, words, values)
    parsed = options.build_options(arguments, read, where=where, titled=False)
    if getattr(getattr(parsed, "command", parsed), "quiet", False):
        logging.getLogger("wellposed").setLevel(logging.WARNING)  # `main` puts it back
    return parsed


def _read(
    reader: argparse.ArgumentParser,
    declared: Sequence[tuple[argparse.Action, bool]],
    words: Sequence[str],
    values: Mapping[str, Any],
) -> dict[str, Any]:
    """Return ``values`` with those of the words in their place."""
    known = {word: action for action, _ in declared for word in action.option_strings}
    spelled: list[str] = []
    for word in words:
        before = known.get(spelled[-1]) if spelled else None
        if before is not None and before.nargs != 0 and _dashed(word) not in known:
            spelled[-1] += f"={word}"  # argparse takes a word that begins with - for an option
        else:
            spelled.append(_dashed(word))
    read: dict[str, Any] = {name: dict(table) for name, table in values.items()}
    try:
        given, rest = reader.parse_known_intermixed_args(spelled)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{reader.prog}: {error.argument_name}: {error.message}") from None
    if rest:
        near = [word for word in known if not word.startswith("--no-")]
        error = unknown_name(f"option of {reader.prog}", rest[0].partition("=")[0], near)
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
        raise ConfigError(f"{reader.prog}: {'; '.join(missing)}")
    return read


def _declare(
    reader: argparse._ActionsContainer,
    cls: type[Any],
    values: Mapping[str, Any],
    shown: Collection[str] | None,
    *,
    section: str = "",
    start: str = "--",
) -> Iterator[tuple[argparse.Action, bool]]:
    """Let ``reader`` know the options of ``cls``; yield each, and whether it has no default.

    ``shown`` are the dotted names of those that the help shows, beside those without a default;
    None: all.
    """
    needed, help_of, hints = options.required(cls), _help_of(cls), options.checked_hints(cls)
    for item in dataclasses.fields(cls):
        name, hint = item.name, hints[item.name]
        kind, marks = options.unwrapped(hint)
        typed = next((mark for mark in marks if isinstance(mark, Typed)), Typed())
        word = (name if typed.name is None else typed.name).replace("_", "-")
        if dataclasses.is_dataclass(kind):
            group = reader.add_argument_group((kind.__doc__ or name).partition("\n")[0].rstrip("."))
            inside = start if typed == Flat else f"--{word}."
            known = values.get(name, {})
            of = cast(type, kind), known, shown
            yield from _declare(group, *of, section=f"{name}.", start=inside)
            continue
        value, about = values.get(name, item.default), help_of.get(name, "").replace("%", "%%")
        if not (name in needed or value is None or value is False or value in ("", ())):
            about += f" (default: {value})"
        if not (shown is None or name in needed or f"{start[2:]}{name}" in shown):
            about = argparse.SUPPRESS
        settings: dict[str, Any] = {"dest": f"{section}{name}", "help": about}
        several = get_origin(kind) is tuple
        one = get_args(kind)[0] if several else hint
        if kind is bool:
            settings["action"] = argparse.BooleanOptionalAction
        else:
            settings["type"] = partial(options.read_word, hint=one)
            settings["metavar"] = typed.metavar or _metavar(one)
        if typed.is_positional:
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

    model: Annotated[str, Typed(metavar="MODEL", is_positional=True)] = ""
    """A run folder, a saved Hugging Face model, a config.json (random weights) or a hub name; also as --from MODEL."""
    source: Annotated[str, Typed("from", "MODEL")] = ""
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


def _metavar(hint: Any) -> str:
    """Return FLOAT|STR for ``float | str | None``, and a|b for literals."""
    kind, _ = options.unwrapped(hint)
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    kinds = [each for each in get_args(kind) or (kind,) if each is not type(None)]
    names = [_metavar(each) if get_args(each) else each.__name__.upper() for each in kinds]
    return "|".join(names)


def _help_of(cls: type[Any]) -> dict[str, str]:
    """Return the docstring below each option of a dataclass, as one line."""
    bases = reversed(cls.__mro__[:-1])
    found = [each for base in bases for each in parse_from_object(base).params]
    return {each.arg_name: " ".join((each.description or "").split()) for each in found}
