"""The parser of every command: tyro, with help that shows the most used options first and errors of
one line."""

from __future__ import annotations

import dataclasses
import logging
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, redirect_stderr, suppress
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import tyro
from docstring_parser import parse_from_object
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from wellposed.errors import ConfigError
from wellposed.options import CheckedOptions, refused_together

Arguments = TypeVar("Arguments")
ImportedFiles: TypeAlias = Annotated[
    tuple[Path, ...], tyro.conf.arg(name="import", metavar="FILE.py"), tyro.conf.UseAppendAction
]
"""The option ``--import FILE.py``: code of the user's own, which `main` runs first."""
Flat = tyro.conf.arg(name="")
HELP, HELP_ALL = frozenset({"-h", "--help"}), "--help-all"
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
    default: Arguments | None = None,
    common: Collection[str] = (),
) -> Arguments:
    """Return the options among the words of a command.

    Args:
        arguments: dataclass of the options; its docstrings are their help.
        words: what followed the command's name.
        prog: the command, as usage and messages print it.
        description: the first lines of the help; the docstring of ``arguments`` where not given.
        default: values where no option is given.
        common: dotted names of the options that ``--help`` shows, ``--help-all`` shows all; empty:
        both show all.
    """
    if asks := any(word in {*HELP, HELP_ALL} for word in words):
        short = bool(common) and any(word in HELP for word in words)
        arguments, default = described(arguments, default, common if short else None)
        if short:
            more = f"The most used options; `{prog} {HELP_ALL}` lists all."
            description = f"{description or ''}\n\n{more}"
    words = ["--help" if word == HELP_ALL else word for word in words]
    how = {"default": default, "prog": prog, "description": description}
    said = StringIO()
    try:
        with _REGISTRY, refused_together(), nullcontext() if asks else redirect_stderr(said):
            parsed = tyro.cli(arguments, args=words, **how)
    except SystemExit as stop:
        if asks or not stop.code:
            raise
        raise ConfigError(f"{_one_line(said.getvalue())}; `{prog} --help` lists options") from None
    if getattr(getattr(parsed, "command", parsed), "quiet", False):
        logging.getLogger("wellposed").setLevel(logging.WARNING)  # `main` puts it back
    return typing.cast(Arguments, parsed)


def _one_line(panel: str) -> str:
    """Return what tyro says of wrong words in a panel, as one line."""
    lines = [line.strip("│| ") for line in panel.splitlines()[1:]]
    parts = re.split(r"^[^\w\n]{20,}$", "\n".join(lines), flags=re.MULTILINE)
    first, more, *_ = [*filter(None, map(str.strip, parts)), ""]
    said = " ".join(first.split()).rstrip(".").replace("Error parsing ", "")
    if "Perhaps" in more:
        said += f"; nearest: {', '.join(re.findall(r'^(--[^ ,]+)', more, re.MULTILINE)[:3])}"
    elif "Argument helptext" in more:
        said += f"; expected {' '.join(more.split()[2:])}"
    return said


@dataclass(frozen=True)
class ModelArguments(CheckedOptions):
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


def described(
    cls: type[Any], default: Any, shown: Collection[str] | None, prefix: str = ""
) -> tuple[type[Any], Any]:
    """Return ``cls`` and ``default`` for a help text: each option's docstring as one paragraph, no
    default that says nothing, and of the options that may be left out those with a dotted name in
    ``shown`` (None: all)."""
    hints, help_of = typing.get_type_hints(cls, include_extras=True), _help_of(cls)
    fields, values = [], {}
    for item in dataclasses.fields(cls):
        hint, path = hints[item.name], f"{prefix}{item.name}"
        inner, marks = _unwrapped(hint)
        value = getattr(cls if default is None else default, item.name, tyro.MISSING)
        if dataclasses.is_dataclass(inner):
            below = prefix if Flat in marks else f"{path}."
            inside, value = described(typing.cast(type, inner), value, shown, below)
            hint = Annotated[(inside, *marks)] if marks else inside
        elif shown is not None and path not in shown and value is not tyro.MISSING:
            hint = Annotated[hint, tyro.conf.Suppress]
        else:
            nothing = any(value is each for each in (None, False, "", tyro.MISSING))
            said = "" if nothing else None
            about = tyro.conf.arg(help=help_of.get(item.name), help_behavior_hint=said)
            hint = Annotated[hint, about]
        values[item.name] = value
        fields.append((item.name, hint, field(default=value)))
    made = dataclasses.make_dataclass(cls.__name__, fields, bases=(cls,), frozen=True, kw_only=True)
    made.__doc__ = cls.__doc__
    return made, unchecked(made, values)


def _help_of(cls: type[Any]) -> dict[str, str]:
    """Return the docstring below each option of a dataclass, as one line."""
    bases = reversed(cls.__mro__[:-1])
    found = [each for base in bases for each in parse_from_object(base).params]
    return {each.arg_name: " ".join((each.description or "").split()) for each in found}


def unchecked(options: type[Arguments], values: Mapping[str, Any]) -> Arguments:
    """Return options in which some values may still be missing, which the parser then asks for."""
    made = object.__new__(options)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _unwrapped(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return (hint.__origin__, hint.__metadata__) if hasattr(hint, "__metadata__") else (hint, ())


_REGISTRY = ConstructorRegistry()


@_REGISTRY.primitive_rule
def _optional_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Show ``float | str | None`` as FLOAT|STR; tyro's own rule shows {None}|FLOAT|STR."""
    *kinds, none = [_unwrapped(kind)[0] for kind in typing.get_args(info.type)] or [None]
    if none is not type(None) or not set(kinds) <= {int, float, str, Path}:
        return None

    def read(words: list[str]) -> Any:
        for kind in kinds if words != ["None"] else ():
            with suppress(ValueError):
                return kind(words[0])
        if words == ["None"]:
            return None
        raise ValueError(f"{words[0]!r} is no {metavar}")

    metavar = "|".join(kind.__name__.upper() for kind in kinds)
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda value: value is None or isinstance(value, tuple(kinds)),
        str_from_instance=lambda value: [str(value)],
    )
