"""The parser of every command: values by type hints of dataclasses, help by argparse."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, cast, get_args, get_origin

from wellposed import options
from wellposed.errors import ConfigError, unknown_name
from wellposed_lab.cli.option_help import help_of


@dataclass(frozen=True)
class Typed:
    """How an option is written on the command line; used inside ``Annotated``."""

    name: str | None = None
    """The option's word, if not the field's name. Empty for a section: no prefix ``SECTION.``."""
    metavar: str | None = None
    """Placeholder of the value in the help."""
    is_positional: bool = False
    """Whether the option is a word without a name."""


Arguments = TypeVar("Arguments")
ImportedFiles: TypeAlias = Annotated[tuple[Path, ...], Typed("import", "FILE.py")]
"""The option ``--import FILE.py``: the user's own code, which `main` runs first."""
Flat = Typed("")
Positional = Typed(is_positional=True)
HELP = frozenset({"-h", "--help"})
HELP_ALL = "--help-all"


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
        arguments: Dataclass of the options; its docstrings are their help.
        words: The words after the command's name.
        prog: The command, as printed in usage and messages.
        description: The first lines of the help; default: the docstring of ``arguments``.
        values: Values of options that are not among the words, with a table for each section.
        common: Dotted names of the options that ``--help`` shows (``--help-all``: all); empty: all.

    Raises:
        ConfigError: unknown or missing options, or values that are missing, wrong or refused.
    """
    values = values or {}
    listed = common if common and {*words} & HELP else None
    reader = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [OPTIONS]",
        description=description or arguments.__doc__,
        epilog=f"The most used options; `{prog} {HELP_ALL}` lists all." if listed else None,
        formatter_class=partial(argparse.HelpFormatter, max_help_position=32),
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
    )
    declared = list(_declare(reader, arguments, values, listed))
    if {*words} & {*HELP, HELP_ALL}:
        reader.print_help()
        raise SystemExit(0)
    where = prog.removeprefix("wellposed ")
    read = _read(reader, declared, words, values)
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
    known = {word: action for action, _ in declared for word in action.option_strings}
    spelled: list[str] = []
    for word in words:
        before = known.get(spelled[-1]) if spelled else None
        if before is not None and before.nargs != 0 and _dashed(word) not in known:
            spelled[-1] += f"={word}"  # argparse would read a word with a leading - as an option
        else:
            spelled.append(_dashed(word))
    read: dict[str, Any] = {name: dict(table) for name, table in values.items()}
    try:
        parsed, rest = reader.parse_known_intermixed_args(spelled)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{reader.prog}: {error.argument_name}: {error.message}") from None
    if rest:
        near = [word for word in known if not word.startswith("--no-")]
        error = unknown_name(f"option of {reader.prog}", rest[0].partition("=")[0], near)
        raise ConfigError(f"{error}; see {HELP_ALL}")
    for key, value in vars(parsed).items():
        section, _, name = key.rpartition(".")
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
    listed: Collection[str] | None,
    *,
    section: str = "",
    start: str = "--",
) -> Iterator[tuple[argparse.Action, bool]]:
    """Declare the options of ``cls`` to ``reader``; yield each one, and whether it is required.
    Help shows the optional ones in ``listed`` (dotted names), or all for None."""
    needed = options.required(cls)
    texts = help_of(cls)
    hints = options.checked_hints(cls)
    for item in dataclasses.fields(cls):
        name = item.name
        hint = hints[item.name]
        kind, marks = options.unwrapped(hint)
        typed = next((mark for mark in marks if isinstance(mark, Typed)), Typed())
        word = (name if typed.name is None else typed.name).replace("_", "-")
        if dataclasses.is_dataclass(kind):
            group = reader.add_argument_group((kind.__doc__ or name).partition("\n")[0].rstrip("."))
            inside = start if typed == Flat else f"--{word}."
            known = values.get(name, {})
            nested = cast(type, kind)
            section_name = f"{name}."
            yield from _declare(group, nested, known, listed, section=section_name, start=inside)
            continue
        value = values.get(name, item.default)
        about = texts.get(name, "").replace("%", "%%")
        if not (name in needed or value is None or value is False or value in ("", ())):
            about += f" (default: {value})"
        if not (listed is None or name in needed or f"{start[2:]}{name}" in listed):
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
    name, equals, text = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{text}" if name.startswith("--") else word


@dataclass(frozen=True)
class ModelArguments(options.CheckedOptions):
    """The model that a command reads, and the user's own code that it needs."""

    model: Annotated[str, Typed(metavar="MODEL", is_positional=True)] = ""
    """A run folder, Hugging Face folder, config.json (random weights) or hub name; also --from."""
    source: Annotated[str, Typed("from", "MODEL")] = ""
    """Same as MODEL."""
    imports: ImportedFiles = ()
    """Run this Python file first, if the run was made with it; folders never run code."""


Model = TypeVar("Model", bound=ModelArguments)


def parse_with_model(arguments: type[Model], command: str, words: Sequence[str]) -> Model:
    """Return the options of a command that reads a ``model``; none or two are a `ConfigError`."""
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
    kinds = [member for member in get_args(kind) or (kind,) if member is not type(None)]
    names = [_metavar(member) if get_args(member) else member.__name__.upper() for member in kinds]
    return "|".join(names)
