"""Options dataclasses from plain values, with every problem named at once; free of torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from wellposed.errors import ConfigError, listed, nearest_names

T = TypeVar("T")


class OptionsError(ConfigError):
    """Values that options cannot have; `problems` has one line for each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("the configuration cannot be used:\n" + listed(problems))


def refuse(problems: list[str]) -> None:
    """Raise one error that lists all ``problems``, if there are any; an options class calls it on
    its own values."""
    if problems:
        raise OptionsError(problems)


def build_options(options_class: type[T], values: Mapping[str, Any], *, where: str) -> T:
    """Return ``options_class(**values)``, with the tables among the values built into the options
    their fields hold.

    Args:
        options_class: a dataclass; its ``__post_init__`` may `refuse` values that are out of range.
        values: plain values by field name, as read from TOML, JSON or a command line.
        where: what the lines of an error begin with, such as a file name.

    Raises:
        ConfigError: everything that `option_problems` names, and every value that a class refuses,
        in one message.

    >>> @dataclasses.dataclass
    ... class Options:
    ...     steps: int = 1
    >>> build_options(Options, {"stepz": 3, "steps": "4"}, where="run.toml")
    Traceback (most recent call last):
    ...
    wellposed.options.OptionsError: the configuration cannot be used:
      run.toml: unknown option 'stepz'; nearest: steps
      run.toml: steps = '4', expected int
    """
    built, problems = dict(values), []
    for name, hint in get_type_hints(options_class).items():
        if (
            isinstance(hint, type)
            and dataclasses.is_dataclass(hint)
            and isinstance(values.get(name), Mapping)
        ):
            try:
                built[name] = build_options(hint, values[name], where=f"{where}: [{name}]")
            except OptionsError as error:
                problems += error.problems
                del built[name]
    problems += option_problems(options_class, built, where=where)
    if not problems:
        try:
            return options_class(**built)
        except OptionsError as error:
            problems = [f"{where}: {problem}" for problem in error.problems]
    raise OptionsError(problems)


def flat_options(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested options as one level with dotted names.

    >>> flat_options({"model": {"norm": "pre"}, "task": "listops"})
    {'model.norm': 'pre', 'task': 'listops'}
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= (
            flat_options(value, f"{prefix}{name}.")
            if isinstance(value, Mapping)
            else {prefix + name: value}
        )
    return flat


def option_problems(
    options_class: type[Any], values: Mapping[str, Any], *, where: str
) -> list[str]:
    """Return one line for each value that ``options_class(**values)`` has no field of its name and
    type for.

    Exact for the hints that options have: plain types, literals, ``None`` and unions of them.
    ``True`` is no int.

    Args:
        options_class: a dataclass.
        values: plain values by field name, as read from TOML, JSON or a command line.
        where: what the lines begin with, such as a file name.

    Returns:
        the lines, empty where all is well; a field without a default that has no value is a line
        too.

    Cost: none that matters. When not to use: ranges of numbers, which an options class checks
    itself.

    >>> @dataclasses.dataclass
    ... class Options:
    ...     steps: int
    ...     size: Literal["small", "large"] | None = None
    >>> option_problems(Options, {"steps": 3, "size": "large"}, where="run.toml")
    []
    >>> option_problems(Options, {"sise": 1, "size": "huge"}, where="run.toml")[1:]
    ["run.toml: size = 'huge', expected 'small' or 'large' or nothing", "run.toml: option 'steps' is
    missing"]
    """
    hints = get_type_hints(options_class)
    fields = dataclasses.fields(options_class)
    known = [field.name for field in fields]
    problems = []
    for name, value in values.items():
        if name not in known:
            problems.append(
                f"{where}: unknown option {name!r}; nearest:"
                f" {', '.join(nearest_names(name, known))}"
            )
        elif not _fits(value, hints[name]):
            problems.append(f"{where}: {name} = {value!r}, expected {_describe(hints[name])}")
    required = [field.name for field in fields if _is_required(field)]
    return [
        *problems,
        *(f"{where}: option {name!r} is missing" for name in required if name not in values),
    ]


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
        elif dataclasses.is_dataclass(option) or option is Mapping:
            names.append("a table of options")
        else:
            names.append(option.__name__ if isinstance(option, type) else repr(option))
    return " or ".join(names)
