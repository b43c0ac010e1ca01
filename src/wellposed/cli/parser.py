"""One parser for all commands: tyro, with optional values shown as what they are and help that fits
a screen first."""

from __future__ import annotations

import dataclasses
import logging
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import tyro
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
    "--fp16": "--precision fp16",
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
    if common and any(word in HELP for word in words):
        arguments, default = only(arguments, default, common)
        description = (
            f"{description or ''}\n\nThe most used options; `{prog} {HELP_ALL}` lists all."
        )
    words = ["--help" if word == HELP_ALL else word for word in words]
    how = {"default": default, "prog": prog, "description": description}
    with _REGISTRY, refused_together():
        parsed = tyro.cli(arguments, args=words, **how)
    if getattr(getattr(parsed, "command", parsed), "quiet", False):
        logging.getLogger("wellposed").setLevel(logging.WARNING)  # `main` puts it back
    return typing.cast(Arguments, parsed)


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


def parse_with_model(
    arguments: type[Model], command: str, words: Sequence[str], description: str | None = None
) -> Model:
    """Return the options of a command that reads a model, which is then in ``model``.

    Raises:
        ConfigError: no model is named, or two.
    """
    parsed = parse_words(arguments, words, prog=f"wellposed {command}", description=description)
    if bool(parsed.model) == bool(parsed.source):
        raise ConfigError(
            f"wellposed {command}: give a model, as the first word or with --from: a folder, a"
            " config.json or a hub name"
        )
    return dataclasses.replace(parsed, model=parsed.model or parsed.source, source="")


def only(
    cls: type[Any], default: Any, names: Collection[str], prefix: str = ""
) -> tuple[type[Any], Any]:
    """Return ``cls`` and ``default`` with all options hidden but those needed and those whose
    dotted name is named."""
    hints = typing.get_type_hints(cls, include_extras=True)
    fields, values = [], {}
    for item in dataclasses.fields(cls):
        hint, path = hints[item.name], f"{prefix}{item.name}"
        inner, marks = _unwrapped(hint)
        value = getattr(default, item.name)
        if dataclasses.is_dataclass(inner):
            short, value = only(
                typing.cast(type, inner), value, names, prefix if Flat in marks else f"{path}."
            )
            hint = Annotated[(short, *marks)] if marks else short
        elif path not in names and value is not tyro.MISSING:
            hint = Annotated[hint, tyro.conf.Suppress]
        values[item.name] = value
        fields.append((item.name, hint, field(default=value)))
    short = dataclasses.make_dataclass(
        cls.__name__, fields, bases=(cls,), frozen=True, kw_only=True
    )
    short.__doc__ = cls.__doc__
    return short, unchecked(short, values)


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
    """Show ``int | None`` as INT; tyro's own rule shows {None}|INT."""
    kinds = [_unwrapped(kind)[0] for kind in typing.get_args(info.type)]
    if len(kinds) != 2 or kinds[1] is not type(None) or kinds[0] not in (int, float, str, Path):
        return None
    kind = kinds[0]
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper(),
        instance_from_str=lambda words: None if words == ["None"] else kind(words[0]),
        is_instance=lambda value: value is None or isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )
