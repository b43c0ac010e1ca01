"""Plain values against an options dataclass: unknown names, wrong types, missing ones; free of torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from wellposed.errors import ConfigError, listed, nearest_names

Options = TypeVar("Options")


class OptionsError(ConfigError):
    """Options hold values that cannot be used; `problems` has one line for each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("the options cannot be used:\n" + listed(problems))


def build_options(
    options_class: type[Options], values: Mapping[str, Any], *, where: str, unchecked: frozenset[str] = frozenset()
) -> Options:
    """Return ``options_class(**values)``, or raise one error that names everything wrong with the values.

    Args:
        options_class: a dataclass; it may raise `OptionsError` for values out of range.
        values: plain values by field name, as read from TOML, JSON or a command line.
        where: what the lines of the error begin with, such as a file name.
        unchecked: fields whose type is not looked at.

    Raises:
        OptionsError: the values are no mapping, or have the problems of `option_problems` or of the class itself.

    When not to use: values that are typed already; call the class.

    >>> @dataclasses.dataclass
    ... class Options:
    ...     steps: int = 10
    >>> build_options(Options, {"steps": 3}, where="run.toml")
    Options(steps=3)
    """
    if not isinstance(values, Mapping):
        raise OptionsError([f"{where}: expected a table of options, received {values!r}"])
    problems = option_problems(options_class, values, where=where, unchecked=unchecked)
    if problems:
        raise OptionsError(problems)
    try:
        return options_class(**values)
    except OptionsError as error:
        raise OptionsError([f"{where}: {problem}" for problem in error.problems]) from None


def option_problems(
    options_class: type[Any], values: Mapping[str, Any], *, where: str, unchecked: frozenset[str] = frozenset()
) -> list[str]:
    """Return one line for each value that ``options_class(**values)`` has no field of its name and type for.

    Exact for the hints that options have: plain types, literals, ``None`` and unions of them. ``True`` is no int.

    Args:
        options_class: a dataclass.
        values: plain values by field name, as read from TOML, JSON or a command line.
        where: what the lines begin with, such as a file name.
        unchecked: fields whose type is not looked at.

    Returns:
        the lines, empty where all is well; a field without a default that has no value is a line too.

    When not to use: ranges of numbers, which an options class checks itself.

    >>> @dataclasses.dataclass
    ... class Options:
    ...     steps: int
    ...     size: Literal["small", "large"] | None = None
    >>> option_problems(Options, {"steps": 3, "size": "large"}, where="run.toml")
    []
    >>> option_problems(Options, {"sise": 1, "size": "huge"}, where="run.toml")[1:]
    ["run.toml: size = 'huge', expected 'small' or 'large' or nothing", "run.toml: option 'steps' is missing"]
    """
    hints = get_type_hints(options_class)
    fields = dataclasses.fields(options_class)
    known = [field.name for field in fields]
    problems = []
    for name, value in values.items():
        if name not in known:
            problems.append(f"{where}: unknown option {name!r}; nearest: {', '.join(nearest_names(name, known))}")
        elif name not in unchecked and not _fits(value, hints[name]):
            problems.append(f"{where}: {name} = {value!r}, expected {_describe(hints[name])}")
    required = [field.name for field in fields if _is_required(field)]
    return [*problems, *(f"{where}: option {name!r} is missing" for name in required if name not in values)]


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types and literal values a hint allows."""
    origin = get_origin(hint)
    if origin is Literal:
        return get_args(hint)
    if origin in (Union, UnionType):
        return tuple(part for option in get_args(hint) for part in _alternatives(option))
    return (origin or hint,)


def _fits(value: Any, hint: Any) -> bool:
    for option in _alternatives(hint):
        if not isinstance(option, type):
            if value == option and type(value) is type(option):
                return True
        elif isinstance(value, bool):
            if option is bool:
                return True
        elif isinstance(value, option) or (option is float and isinstance(value, int)):
            return True
    return False


def _describe(hint: Any) -> str:
    names = []
    for option in _alternatives(hint):
        if option is NoneType:
            names.append("nothing")
        else:
            names.append(option.__name__ if isinstance(option, type) else repr(option))
    return " or ".join(names)
