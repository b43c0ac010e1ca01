"""Names of earlier versions: an error says what to use now."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from wellposed.errors import ConfigError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def removed_names(package: str, uses: Mapping[str, str]) -> Callable[[str], Any]:
    """Return ``__getattr__`` of a module whose old names say what to use: old name -> advice.

    >>> removed_names("wellposed.models", {"SHARPNESS": "use LOGIT_SCALE"})("SHARPNESS")
    Traceback (most recent call last):
    AttributeError: module 'wellposed.models' has no attribute 'SHARPNESS'; use LOGIT_SCALE
    """

    def refuse(name: str) -> Any:
        advice = f"; {uses[name]}" if name in uses else ""
        raise AttributeError(f"module {package!r} has no attribute {name!r}{advice}")

    return refuse


def removed_keywords(
    **new_names: str,
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Return a decorator for a call that refuses its old keywords by their new names: old="new".

    Goes above `known_keywords`, which knows nothing of earlier versions. Raises `ConfigError`.

    >>> removed_keywords(keep="exclude")(lambda *, exclude=(): exclude)(keep="norm")
    Traceback (most recent call last):
    wellposed.errors.ConfigError: <lambda>: keep= is exclude= now; write exclude='norm'
    """

    def declare(call: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        name = call.__qualname__.removesuffix(".__init__")

        @functools.wraps(call)
        def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            for old, new in new_names.items():
                if old in kwargs:
                    line = f"{name}: {old}= is {new}= now"
                    raise ConfigError(f"{line}; write {new}={kwargs[old]!r}")
            return call(*args, **kwargs)

        return checked

    return declare
