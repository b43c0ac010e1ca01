"""Options dataclasses whose type hints state their valid values, and their checker; no torch.

``steps: Annotated[int, Ge(1)] = 100`` means the same on the command line, in TOML and in Python.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar, Union

from wellposed.errors import ConfigError, listed, nearest_names, unknown_name

T = TypeVar("T")


_HOLDS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}


@dataclass(frozen=True)
class _Limit:
    """A constraint on a number: ``sign`` and ``limit``."""

    sign: str
    limit: float

    def __str__(self) -> str:
        return f"{self.sign} {self.limit:g}" if self.limit < 1 else f"{self.sign} {self.limit}"


Ge, Gt, Le, Lt = (functools.partial(_Limit, sign) for sign in _HOLDS)

Size: TypeAlias = Annotated[int, Ge(1)]
Count: TypeAlias = Annotated[int, Ge(0)]
Strength: TypeAlias = Annotated[float, Ge(0)]
Positive: TypeAlias = Annotated[float, Gt(0)]
Rate: TypeAlias = Annotated[float, Ge(0), Lt(1)]
Seed: TypeAlias = Annotated[int, Ge(0), Lt(2**32)]


def rms_radius(bound: str) -> float | None:
    """Return X of a spectral bound ``rms:X`` in units of root mean squares, else None."""
    name, _, number = bound.partition(":")
    try:
        size = float(number)
    except ValueError:
        return None
    return size if name == "rms" and 0 < size < math.inf else None


class OptionsError(ConfigError):
    """Invalid values of options; `problems` has one line for each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("the configuration cannot be used:\n" + listed(problems))


@dataclass(frozen=True)
class CheckedOptions:
    """Base of options checked on creation: each value by its hint, then all by `problems`.

    >>> @dataclass(frozen=True)
    ... class Options(CheckedOptions):
    ...     steps: Size = 1
    >>> Options(steps=0)
    Traceback (most recent call last):
    wellposed.options.OptionsError: the configuration cannot be used:
      steps = 0, expected an integer >= 1
    """

    def __new__(cls, *_: Any, **values: Any) -> Self:
        for name in values:
            if name not in cls.__dataclass_fields__:
                raise unknown_name(f"option of {cls.__name__}", name, cls.__dataclass_fields__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        hints = checked_hints(type(self))
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        problems = value_problems(values, hints) or [*self.problems()]
        if problems:
            raise OptionsError(problems)

    def problems(self) -> Iterable[str]:
        """Return one line for each value that conflicts with other values."""
        return []


@functools.cache
def checked_hints(options_class: type[Any]) -> dict[str, Any]:
    """Return the type hints of the fields of a dataclass, with constraints."""
    hints = typing.get_type_hints(options_class, include_extras=True)
    fields = dataclasses.fields(options_class)
    return {item.name: hints[item.name] for item in fields}


def misfits(values: Mapping[str, Any], hints: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield name, value and expectation for each value that its hint does not allow.

    Exact for plain types, literals, ``None``, unions, and these in ``Annotated`` with constraints
    or texts (advice). ``True`` is not an int; an int must fit 64 bits and a float be finite.
    """
    for name, value in values.items():
        if not fits(value, hints[name]):
            *most, last = [_described(*allowed) for allowed in _alternatives(hints[name])]
            expected = f"{', '.join(most)} or {last}" if most else last
            metadata = getattr(hints[name], "__metadata__", ())
            advice = [text for text in metadata if type(text) is str]
            yield name, value, "; ".join([expected, *advice])


def fits(value: Any, hint: Any) -> bool:
    """Return whether a hint allows a value."""
    return any(_fits(value, kind, limits) for kind, limits in _alternatives(hint))


def is_plain(hint: Any) -> bool:
    """Return whether `fits` understands a hint: numbers, flags, literals and ``None``."""
    plain = (int, float, bool, NoneType)
    return all(kind in plain or isinstance(kind, (str, int)) for kind, _ in _alternatives(hint))


def value_problems(values: Mapping[str, Any], hints: Mapping[str, Any]) -> list[str]:
    """Return one line for each value that its hint does not allow."""
    wrong = misfits(values, hints)
    return [f"{name} = {value!r:.200}, expected {expected}" for name, value, expected in wrong]


def build_options(
    options_class: type[T], values: Mapping[str, Any], *, where: str, titled: bool = True
) -> T:
    """Return ``options_class(**values)``; tables become the options of their field.

    Args:
        options_class: a dataclass; `CheckedOptions` also report their ``problems``.
        values: plain values by field name, as read from TOML, JSON or a command line.
        where: start of each line of an error, such as a file name.
        titled: whether lines about a table name it.

    Raises:
        ConfigError: unknown, refused and missing options, all in one message.

    >>> Steps = dataclasses.make_dataclass("Steps", [("steps", int)])
    >>> build_options(Steps, {"stepz": 3}, where="run.toml")
    Traceback (most recent call last):
    wellposed.options.OptionsError: the configuration cannot be used:
      run.toml: unknown option 'stepz'; nearest: steps
      run.toml: option 'steps' is missing
    """
    hints = checked_hints(options_class)
    built = dict(values)
    problems = []
    for name, hint in hints.items():
        table = unwrapped(hint)[0]
        if dataclasses.is_dataclass(table) and isinstance(values.get(name), Mapping):
            inside = f"{where}: [{name}]" if titled else where
            try:
                built[name] = build_options(
                    typing.cast(type, table), values[name], where=inside, titled=titled
                )
            except OptionsError as error:
                problems += error.problems
                del built[name]

    unknown = {name: nearest_names(name, hints) for name in built if name not in hints}
    wrong = [f"unknown option {n!r}; nearest: {', '.join(near)}" for n, near in unknown.items()]
    wrong += value_problems({n: value for n, value in built.items() if n in hints}, hints)
    wrong += [
        f"option {name!r} is missing" for name in required(options_class) if name not in values
    ]
    if not (wrong or problems):
        try:
            return options_class(**built)
        except OptionsError as error:
            wrong = error.problems
    raise OptionsError([*problems, *(f"{where}: {problem}" for problem in wrong)])


def required(options_class: type[Any]) -> list[str]:
    """Return the names of the fields of a dataclass that have no default."""
    none = dataclasses.MISSING
    items = dataclasses.fields(options_class)
    return [item.name for item in items if item.default is item.default_factory is none]


def read_word(word: str, hint: Any) -> Any:
    """Return the value of a word on the command line, or the word if its hint fits none."""
    if word == "None" and fits(None, hint):
        return None
    for kind, _ in _alternatives(hint):
        if kind is Path and not word:
            continue  # Path("") is the current folder
        if kind in (int, float, str, Path):
            with suppress(ValueError):
                return kind(word)
        elif word == str(kind):  # of a literal
            return kind
    return word


def unwrapped(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the type of an annotated hint, and its metadata."""
    return (hint.__origin__, hint.__metadata__) if hasattr(hint, "__metadata__") else (hint, ())


def flat_options(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested options as one level with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, Mapping)
        flat |= flat_options(value, f"{prefix}{name}.") if nested else {prefix + name: value}
    return flat


def _alternatives(hint: Any, limits: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield each type or literal value that a hint allows, with its constraints."""
    origin = typing.get_origin(hint)
    if origin is Annotated:
        kind, *more = typing.get_args(hint)
        more = [limit for limit in more if isinstance(limit, _Limit)]
        yield from _alternatives(kind, (*limits, *more))
    elif origin in (Union, UnionType):
        for option in typing.get_args(hint):
            yield from _alternatives(option, limits)
    elif origin is Literal:
        yield from ((value, ()) for value in typing.get_args(hint))
    else:
        yield origin or hint, limits


def _fits(value: Any, kind: Any, limits: tuple[Any, ...]) -> bool:
    if not isinstance(kind, type):
        return value == kind and type(value) is type(kind)
    if isinstance(value, bool) or kind is bool:
        return kind is bool and isinstance(value, bool)
    if kind is int or (kind is float and isinstance(value, int)):
        return isinstance(value, int) and -(2**63) <= value < 2**63 and _within(value, limits)
    if kind is float:
        return isinstance(value, float) and math.isfinite(value) and _within(value, limits)
    return isinstance(value, kind)


def _within(value: float, limits: tuple[Any, ...]) -> bool:
    return all(_HOLDS[limit.sign](value, limit.limit) for limit in limits)


_WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a finite number",
    str: "text",
    bool: "true or false",
    NoneType: "None",
    Path: "a path",
    Mapping: "a table of options",
    dict: "a table",
    list: "a list",
}


def _described(kind: Any, limits: tuple[Any, ...]) -> str:
    if not isinstance(kind, type):
        return repr(kind)
    words = _WORDS.get(Mapping if dataclasses.is_dataclass(kind) else kind, kind.__name__)
    return " and ".join([f"{words} {limits[0]}", *map(str, limits[1:])]) if limits else words
