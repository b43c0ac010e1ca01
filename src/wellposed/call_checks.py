"""Checks of the keywords and arguments of public calls."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable
from numbers import Number
from typing import Any, ParamSpec, TypeVar, get_type_hints

from wellposed.errors import (
    ConfigError,
    WellposedError,
    is_about_resources,
    unknown_name,
)
from wellposed.options import is_plain, value_problems

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def known_keywords(call: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a call refuse misspelt keywords (with the nearest three) and explain failures in torch.

    The error then names the argument or mode at fault. Complex numbers are refused, as formulas for
    real ones give meaningless results. Raises `ConfigError`. Cost: about a microsecond.

    >>> known_keywords(lambda *, where, roles=(): where)(were="0")  # type: ignore
    Traceback (most recent call last):
    wellposed.errors.ConfigError: unknown keyword of <lambda> 'were'; nearest: where
    """
    if hasattr(call, "explains"):
        return call
    taken = inspect.signature(call).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    parameters = [name for name in taken if name != "self"]

    @functools.wraps(call)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        for keyword in kwargs:
            if keyword not in parameters and not takes_all:
                raise unknown_name(f"keyword of {_name(call, args)}", keyword, parameters)
        try:
            result = call(*args, **kwargs)
            # A dtype has no `dim`, a parametrisation may; `callable` breaks compiled graphs.
            for value in args:
                if hasattr(value, "is_complex") and hasattr(value, "dim") and value.is_complex():  # pyright: ignore[reportAttributeAccessIssue]
                    raise TypeError("expected real numbers")
            return result
        except Exception as error:
            if isinstance(error, WellposedError) or is_about_resources(error):
                raise
            from wellposed.tensor_calls import refusal_of  # imports torch

            refusal = refusal_of(call, args, kwargs, error)
            if refusal is None:
                raise
            raise refusal from error

    setattr(checked, "explains", True)  # noqa: B010 (a function has no such attribute)
    return checked


def explain_failures_of(package: str, *, but: str | None = None) -> None:
    """Apply `known_keywords` to all functions and layers of a package; call it last in it.

    Functions of the module ``but`` are left out: helpers that run many times in a training step.
    """
    from torch import nn

    published = vars(sys.modules[package])
    for name, value in list(published.items()):
        home = getattr(value, "__module__", None) or ""
        if inspect.isfunction(value) and home.startswith(package) and home != but:
            published[name] = vars(sys.modules[home])[name] = known_keywords(value)
        elif inspect.isclass(value) and issubclass(value, nn.Module):
            kinds = [kind for kind in value.__mro__ if kind.__module__.startswith("wellposed.")]
            for kind, method in itertools.product(kinds, ("forward", "inverse", "lipschitz_bound")):
                if method in vars(kind):
                    setattr(kind, method, known_keywords(vars(kind)[method]))


def _name(call: Callable[..., Any], args: tuple[Any, ...]) -> str:
    return type(args[0]).__name__ if call.__name__ == "__init__" else call.__qualname__


def known_fields(
    inputs: type[Any],
) -> Callable[[Callable[[Any, Any], Result]], Callable[..., Result]]:
    """Return a decorator that turns the fields of ``inputs`` into arguments of a method."""

    def declare(method: Callable[[Any, Any], Result]) -> Callable[..., Result]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **keywords: Any) -> Result:
            return method(self, inputs(*args, **keywords))

        signature = inspect.signature(method)
        first, *_ = signature.parameters.values()
        arguments = inspect.signature(inputs).parameters.values()
        call.__signature__ = signature.replace(parameters=[first, *arguments])  # pyright: ignore[reportAttributeAccessIssue]
        return known_keywords(call)

    return declare


def checked_arguments(
    call: Callable[Arguments, Result], *kinds: type, **sharper: Any
) -> Callable[Arguments, Result]:
    """Make a call refuse misspelt keywords, and values that its type hints do not allow.

    It checks hints of numbers and literals, hints in ``kinds``, and the ``sharper`` hints by name.
    A text in ``Annotated`` is advice that the error repeats.

    >>> @checked_arguments
    ... def draw(pairs: int): ...
    >>> draw(2.5)
    Traceback (most recent call last):
    wellposed.errors.ConfigError: draw: pairs = 2.5, expected an integer
    """
    signature = inspect.signature(call)

    @functools.cache
    def hints() -> dict[str, Any]:
        hints = {**get_type_hints(call, include_extras=True), **sharper}
        return {name: hint for name, hint in hints.items() if hint in kinds or is_plain(hint)}

    @functools.wraps(call)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        where = _name(call, args)
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            names = ", ".join(name for name in signature.parameters if name != "self")
            raise ConfigError(f"{where}: {error}; it takes {names}") from error

        # Numbers of numpy are numbers, too.
        values = {
            name: value.item() if isinstance(value, Number) and hasattr(value, "item") else value  # pyright: ignore[reportAttributeAccessIssue]
            for name, value in arguments.items()
            if name in hints()
        }
        problems = value_problems(values, hints())
        if problems:
            raise ConfigError(f"{where}: {'; '.join(problems)}")

        return call(*args, **kwargs)

    return known_keywords(checked)
