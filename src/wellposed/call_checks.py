"""Checks that public calls share: known keywords, a model that is one; and a line on how far
weights moved."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import sys
from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any, ParamSpec, TypeVar, get_type_hints

from wellposed.errors import ConfigError, WellposedError, shortened, unknown_name
from wellposed.options import is_plain, value_problems

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

FAR = 0.1
"""The part of its norm by which a weight may move before it is warned of."""


def known_keywords(call: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a call refuse a misspelt keyword by a `ConfigError` that lists the nearest three, and name
    the argument or the mode at fault if torch cannot compute it. Complex numbers, for which formulas
    of real ones give a number without meaning, are refused. Cost: about a microsecond.

    >>> known_keywords(lambda *, where, roles=(): where)(were="0")  # type: ignore
    Traceback (most recent call last):
    wellposed.errors.ConfigError: unknown keyword of <lambda> 'were'; nearest: where
    """
    if hasattr(call, "explains"):
        return call
    taken = inspect.signature(call).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    known = [name for name in taken if name != "self"]

    @functools.wraps(call)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        for keyword in kwargs:
            if keyword not in known and not takes_all:
                raise unknown_name(f"keyword of {_name(call, args)}", keyword, known)
        try:
            result = call(*args, **kwargs)
            # A dtype has no `dim`, a parametrisation may have one; `callable` breaks compiled graphs.
            tensors = (
                value for value in args if hasattr(value, "dim") and hasattr(value, "is_complex")
            )
            if any(tensor.is_complex() for tensor in tensors):  # pyright: ignore[reportAttributeAccessIssue]
                raise TypeError("expected real numbers")
            return result
        except Exception as error:
            if isinstance(error, WellposedError):
                raise
            from wellposed.tensor_calls import refusal_of  # imports torch

            if (refusal := refusal_of(call, args, kwargs, error)) is None:
                raise
            raise refusal from error

    setattr(checked, "explains", True)  # noqa: B010 (a function has no such attribute)
    return checked


def explain_failures_of(package: str) -> None:
    """Apply `known_keywords` to every function that a package publishes, and to the passes of its
    modules. It is called once, at the end of the package's ``__init__``: a decorator at each of these
    functions would be a hundred lines that a new function may lack."""
    from torch import nn

    published = vars(sys.modules[package])
    for name, value in list(published.items()):
        home = getattr(value, "__module__", None) or ""
        if inspect.isfunction(value) and home.startswith(package):
            published[name] = vars(sys.modules[home])[name] = known_keywords(value)
        elif inspect.isclass(value) and issubclass(value, nn.Module):
            kinds = [kind for kind in value.__mro__ if kind.__module__.startswith("wellposed.")]
            for kind, method in itertools.product(kinds, ("forward", "inverse", "lipschitz_bound")):
                if method in vars(kind):
                    setattr(kind, method, known_keywords(vars(kind)[method]))


def _name(call: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Return the name of a function, or of the class that a constructor is called for."""
    return type(args[0]).__name__ if call.__name__ == "__init__" else call.__qualname__


def known_fields(
    inputs: type[Any],
) -> Callable[[Callable[[Any, Any], Result]], Callable[..., Result]]:
    """Return a decorator of ``method(self, given)`` that gives it the fields of the dataclass
    ``inputs`` as arguments, which its signature shows, and refuses others as `known_keywords` does.

    >>> from dataclasses import make_dataclass
    >>> class Sum:
    ...     @known_fields(make_dataclass("Pair", ["left", "right"]))
    ...     def total(self, given): return given.left + given.right
    >>> Sum().total(1, right=2), list(inspect.signature(Sum.total).parameters)
    (3, ['self', 'left', 'right'])
    """

    def declare(method: Callable[[Any, Any], Result]) -> Callable[..., Result]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **keywords: Any) -> Result:
            return method(self, inputs(*args, **keywords))

        own = inspect.signature(method)
        first, *_ = own.parameters.values()
        arguments = inspect.signature(inputs).parameters.values()
        call.__signature__ = own.replace(parameters=[first, *arguments])  # pyright: ignore[reportAttributeAccessIssue]
        return known_keywords(call)

    return declare


def checked_arguments(
    call: Callable[Arguments, Result], *kinds: type, **sharper: Any
) -> Callable[Arguments, Result]:
    """Make a call refuse misspelt keywords, and values that its hints do not allow.

    Read are hints of numbers and literals, those that are one of ``kinds``, and ``sharper`` ones by
    name; a text in ``Annotated`` is advice, said with the refusal.

    >>> from typing import Literal
    >>> @checked_arguments
    ... def draw(pairs: int, kind: Literal["a", "b"] = "a"): ...
    >>> draw(2.5)
    Traceback (most recent call last):
    wellposed.errors.ConfigError: draw: pairs = 2.5, expected an integer
    """
    signature = inspect.signature(call)

    @functools.cache
    def hints() -> dict[str, Any]:
        found = {**get_type_hints(call, include_extras=True), **sharper}
        return {each: hint for each, hint in found.items() if hint in kinds or is_plain(hint)}

    @functools.wraps(call)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        where = _name(call, args)
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            names = ", ".join(each for each in signature.parameters if each != "self")
            raise ConfigError(f"{where}: {error}; it takes {names}") from error
        # A number of numpy is one.
        values = {
            each: value.item() if isinstance(value, Number) and hasattr(value, "item") else value  # pyright: ignore[reportAttributeAccessIssue]
            for each, value in given.items()
            if each in hints()
        }
        if problems := value_problems(values, hints()):
            raise ConfigError(f"{where}: {'; '.join(problems)}")
        return call(*args, **kwargs)

    return known_keywords(checked)


def require_module(call: str, model: object) -> None:
    """Raise `ConfigError` for what is no ``torch.nn.Module``, such as the name of a model."""
    if callable(getattr(model, "named_modules", None)) and not isinstance(model, type):
        weights: Any = getattr(model, "named_parameters", dict)()
        lazy = [name for name, weight in weights if type(weight).__name__.startswith("Uninit")]
        if lazy:
            raise ConfigError(
                f"{call}: these weights of lazy layers have no shape yet: {shortened(lazy)}; run the"
                " model once on a batch, then call it again"
            )
        return
    hint = ""
    if isinstance(model, str):
        hint = f"; load it first, as with transformers.AutoModel.from_pretrained({model!r})"
    raise ConfigError(
        f"{call}: expected a model (torch.nn.Module), received {type(model).__name__}{hint}"
    )


def say_moves(logger: logging.Logger, did: str, moved: Mapping[str, float]) -> None:
    """Log what a verb did to weights, ``|W' - W|_F / |W|_F`` by name, as one line: a warning where
    one moved by more than `FAR` of its norm."""
    line, far = f"{did}; none moved", sum(part > FAR for part in moved.values())
    if any(moved.values()):
        worst, mean = max(moved, key=lambda name: moved[name]), sum(moved.values()) / len(moved)
        most = f"{moved[worst]:.2g} at most ({worst})"
        line = f"{did}; moved by {mean:.2g} of their norm on average, {most}"
    if far:
        line += (
            f"; {far} of {len(moved)} by more than a tenth: if they were trained before, the model"
            " now computes something else"
        )
    logger.log(logging.WARNING if far else logging.INFO, "%s", line)
