"""The parser of every command: values by type hints of dataclasses, help by argparse."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
    get_origin,
)

from wellposed import options
from wellposed.errors import ConfigError, unknown_name
from wellposed_lab.cli.option_help import help_of
from wellposed_lab.cli.spellings import DeclaredOption, Spellings


@dataclass(frozen=True)
class Typed:
    """How an option is written on the command line; used inside ``Annotated``."""

    name: str | None = None
    """The option's word, if not the field's name. Empty for a section: no prefix ``SECTION.``."""
    metavar: str | None = None
    """Placeholder of the value in the help."""
    is_positional: bool = False
    """Whether the option is a word without a name."""
    has_short_names: bool = False
    """Whether options of a section may be written without ``SECTION.``, as ``--norm``."""


Arguments = TypeVar("Arguments")
TypedValues: TypeAlias = dict[str, Any]
"""The values among the words, typed, with a table for each section; no defaults."""
ImportedFiles: TypeAlias = Annotated[tuple[Path, ...], Typed("import", "FILE.py")]
"""The option ``--import FILE.py``: the user's own code, which `main` runs first."""
Flat = Typed("")
Positional = Typed(is_positional=True)
HELP = frozenset({"-h", "--help"})
HELP_ALL = "--help-all"
_ASKS_FOR_HELP = frozenset({*HELP, HELP_ALL})


def parse_words(arguments: type[Arguments], words: Sequence[str], *, prog: str) -> Arguments:
    """Return the options among the words of a command, as `Form.read` and `Form.fill` do."""
    form = Form(arguments, prog)
    typed = form.read(words)
    if form.asks_for_help(words):
        form.print_help(words)
        raise SystemExit(0)
    return form.fill(typed)


@dataclass(frozen=True)
class Form(Generic[Arguments]):
    """The options of a command: `read` its words once, then `fill` in what was not typed."""

    arguments: type[Arguments]
    """Dataclass of the options; its docstrings are their help."""
    prog: str
    """The command, as printed in usage and messages."""
    description: str | None = None
    """The first lines of the help; default: the docstring of ``arguments``."""
    common: Collection[str] = ()
    """Dotted names of the options that ``--help`` shows (``--help-all``: all); empty: all."""
    epilog: str = ""
    """The last lines of the help of all options."""
    new_name: Callable[[str], str] = str
    """Function from a word to the same with today's name of its option."""

    def read(self, words: Sequence[str]) -> TypedValues:
        """Return the values among the words.

        Raises:
            ConfigError: unknown or ambiguous options, or values that are missing. Beside a word
                that asks for help, unknown options are ignored.
        """
        reader = argparse.ArgumentParser(
            prog=self.prog,
            add_help=False,
            allow_abbrev=False,
            exit_on_error=False,
            argument_default=argparse.SUPPRESS,
        )
        declared = list(_declare(reader, self.arguments, {}, None))
        options_only = [word for word in words if word not in _ASKS_FOR_HELP]
        spelled = Spellings(declared, self.prog, self.new_name).written_out(options_only)
        try:
            parsed, rest = reader.parse_known_intermixed_args(spelled)
        except argparse.ArgumentError as error:
            after = ", a value after it" if error.message == "expected one argument" else ""
            raise ConfigError(
                f"{self.prog}: {error.argument_name}: {error.message}{after}"
            ) from None
        if rest and not self.asks_for_help(words):
            word = rest[0].partition("=")[0]
            names = [name for option in declared for name in option.names]
            near = [name for name in names if not name.startswith("--no-")]
            error = unknown_name(f"option of {self.prog}", word, near)
            raise ConfigError(f"{error}; see {HELP_ALL}")

        typed: TypedValues = {}
        for key, value in vars(parsed).items():
            section, _, name = key.rpartition(".")
            table = typed.setdefault(section, {}) if section else typed
            table[name] = tuple(value) if isinstance(value, list) else value
        return typed

    def fill(self, typed: TypedValues, values: Mapping[str, Any] | None = None) -> Arguments:
        """Return all options: those typed, then ``values`` (with a table for each section), then
        the defaults of the class.

        Raises:
            ConfigError: options that are required and missing, or values that are refused.
        """
        filled = {name: _copied(value) for name, value in (values or {}).items()}
        for name, value in typed.items():
            filled[name] = {**filled.get(name, {}), **value} if isinstance(value, dict) else value
        declared = _declare(argparse.ArgumentParser(add_help=False), self.arguments, {}, None)
        present = options.flat_options(filled)
        missing = [
            f"{option.label} is missing: {option.action.help}"
            for option in declared
            if option.is_required and option.action.dest not in present
        ]
        if missing:
            raise ConfigError(f"{self.prog}: {'; '.join(missing)}")

        where = self.prog.removeprefix("wellposed ")
        filled_in = options.build_options(self.arguments, filled, where=where, titled=False)
        if getattr(getattr(filled_in, "command", filled_in), "quiet", False):
            logging.getLogger("wellposed").setLevel(logging.WARNING)  # `main` puts it back
        return filled_in

    def asks_for_help(self, words: Sequence[str]) -> bool:
        """Return whether ``-h``, ``--help`` or ``--help-all`` is among the words."""
        return not _ASKS_FOR_HELP.isdisjoint(words)

    def print_help(self, words: Sequence[str], values: Mapping[str, Any] | None = None) -> None:
        """Print the help, with ``values`` as defaults."""
        listed = self.common if self.common and not HELP.isdisjoint(words) else None
        most_used = f"The most used options; `{self.prog} {HELP_ALL}` lists all."
        printer = argparse.ArgumentParser(
            prog=self.prog,
            usage=f"{self.prog} [OPTIONS]",
            description=self.description or self.arguments.__doc__,
            epilog=most_used if listed else self.epilog,
            formatter_class=partial(argparse.HelpFormatter, max_help_position=32),
            add_help=False,
        )
        for _ in _declare(printer, self.arguments, values or {}, listed):
            pass
        printer.print_help()


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _declare(
    reader: argparse._ActionsContainer,
    cls: type[Any],
    values: Mapping[str, Any],
    listed: Collection[str] | None,
    *,
    section: str = "",
    prefix: str = "",
    has_short_names: bool = False,
) -> Iterator[DeclaredOption]:
    """Declare the options of ``cls`` to ``reader``, whose names begin with ``prefix``; yield each.
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
            yield from _declare(
                group,
                cast(type, kind),
                values.get(name, {}),
                listed,
                section=f"{name}.",
                prefix=prefix if typed == Flat else f"{word}.",
                has_short_names=typed.has_short_names,
            )
            continue
        value = values.get(name, item.default)
        about = texts.get(name, "").replace("%", "%%")
        if not (name in needed or value is None or value is False or value in ("", ())):
            about += f" (default: {value})"
        if not (listed is None or name in needed or f"{prefix}{name}" in listed):
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
            action = reader.add_argument(settings.pop("dest"), **settings)
        else:
            settings |= {"action": "append"} if several else {}
            action = reader.add_argument(f"--{prefix}{word}", **settings)
        yield DeclaredOption(action, name in needed, prefix, has_short_names)


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
