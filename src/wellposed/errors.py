"""The one exception family of wellposed.

Every message says what failed, where (dotted module path or ``file:line``), what was received, what
was expected and what to do next; all offenders of one call are in one message.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

MAX_LISTED = 10
MAX_MESSAGE = 8000
"""Characters of a message."""
MAX_SHOWN = 200
"""Characters of a wrong name that a message repeats."""


class WellposedError(Exception):
    """Base of every error wellposed raises on purpose.

    A value of more than `MAX_SHOWN` characters, in quotes or without a blank, is cut in its middle,
    and so is a message of more than `MAX_MESSAGE`.

    >>> len(str(WellposedError("received " + "x" * 10**6)))
    209
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(_cut(each) if isinstance(each, str) else each for each in arguments))


_VALUE = re.compile(rf"""(?<!\w)(['"]).*?\1(?!\w)|\S{{{MAX_SHOWN + 1},}}""")


def shown_value(value: str) -> str:
    """Return a value as messages quote it, at most `MAX_SHOWN` characters: its start and its end."""
    return value if len(value) <= MAX_SHOWN else f"{value[: MAX_SHOWN - 43]}...{value[-40:]}"


def _cut(message: str) -> str:
    message = _VALUE.sub(lambda found: shown_value(found[0]), message)
    left_out, half = len(message) - MAX_MESSAGE, MAX_MESSAGE // 2
    if left_out <= 0:
        return message
    return f"{message[:half]} ... {left_out:,} characters ... {message[-half:]}"


class RoleNotFoundError(WellposedError, ValueError):
    """No weight of the model plays the role (query, key, feed-forward, ...) that was asked for."""


class ShapeError(WellposedError, ValueError):
    """A tensor or a size does not fit: wrong rank, width not divisible by heads, sequence too
    long."""


class NotLipschitzError(WellposedError, ValueError):
    """The map has no global Lipschitz constant, so the certificate asked for does not exist."""


class UnsoundBoundError(WellposedError, RuntimeError):
    """A certificate's own cross-check found a slope above the bound: the rule named is wrong for
    this module."""


class NotContractiveError(WellposedError, ValueError):
    """No bound below 1 is known for the block, so its residual cannot be inverted by a fixed
    point."""


class ConvergenceError(WellposedError, RuntimeError):
    """An iteration ended, or a loss became non-finite, before reaching what was asked."""


class DataError(WellposedError, ValueError):
    """A data file or row is malformed; the message holds ``file:line``."""


class ConfigError(WellposedError, ValueError):
    """A configuration value, name or combination is not usable."""


class CheckpointError(WellposedError, RuntimeError):
    """A checkpoint is incomplete, damaged, or belongs to another configuration."""


def nearest_names(name: str, known: Iterable[str], *, count: int = 3) -> list[str]:
    """Return at most ``count`` known names like ``name``, nearest first: none that is far less like
    it than the nearest.

    >>> nearest_names("post_nl", ["post_ln", "pre_ln", "rezero", "oc1"])
    ['post_ln']
    """
    found = difflib.get_close_matches(name, list(known), n=count, cutoff=0.0)
    likeness = [difflib.SequenceMatcher(None, each, name).ratio() for each in found]
    return [each for each, like in zip(found, likeness, strict=True) if like >= 0.7 * likeness[0]]


def unknown_name(kind: str, name: str, known: Iterable[str]) -> ConfigError:
    """Build the error for a name that is not registered; at most three near ones are listed.

    >>> str(unknown_name("variant", "post_nl", ["post_ln", "pre_ln", "rezero", "oc1"]))
    "unknown variant 'post_nl'; nearest: post_ln"
    """
    known, name = list(known), name if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]}..."
    hint = f"expected one of {shortened(known)}" if known else f"no {kind} is registered"
    if difflib.get_close_matches(name, known, cutoff=0.25):
        hint = f"nearest: {', '.join(nearest_names(name, known))}"
    return ConfigError(f"unknown {kind} {name!r}; {hint}")


OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
"""How torch says so, in its errors of several kinds."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ended, here or on a device."""
    text = str(error).lower()
    torch_says = isinstance(error, RuntimeError) and any(words in text for words in OUT_OF_MEMORY)
    return isinstance(error, MemoryError) or torch_says


def listed(offenders: Sequence[str]) -> str:
    """Join offenders one to a line: the first ten, then a count of the rest.

    >>> print(listed(["a: bad", "b: bad"]))
      a: bad
      b: bad
    """
    lines = [f"  {offender}" for offender in offenders[:MAX_LISTED]]
    if len(offenders) > MAX_LISTED:
        lines.append(f"  ... and {len(offenders) - MAX_LISTED} more")
    return "\n".join(lines)


def shortened(names: Sequence[str]) -> str:
    """Join names in one line: the first ten, then a count of the rest.

    >>> shortened(["a", "b"])
    'a, b'
    """
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{', '.join(names[:MAX_LISTED])}{more}"


EXTRAS = {
    "hf": ("transformers", "tokenizers", "safetensors", "huggingface-hub"),
    "lightning": ("lightning",),
    "lab": (
        *("accelerate", "datasets", "docstring-parser", "rich", "tomli-w", "numpy", "scipy"),
        *("matplotlib", "jinja2"),
    ),
}
"""Optional packages by the extra that installs them."""


def missing_extra(package: str, extra: str, purpose: str) -> ConfigError:
    """Build the error for an optional dependency that is not installed.

    >>> str(missing_extra("jinja2", "lab", "HTML reports"))  # doctest: +NORMALIZE_WHITESPACE
    "HTML reports need the package 'jinja2', which is not installed; run: pip install
    'wellposed[lab]'"
    """
    return ConfigError(
        f"{purpose} need the package {package!r}, which is not installed; run: pip install"
        f" 'wellposed[{extra}]'"
    )


def import_extra(module: str, extra: str, purpose: str, *, package: str = "") -> Any:
    """Import a module of an optional dependency, or say which extra brings it.

    Raises:
        ConfigError: ``package``, by default the module's first name, is not installed.

    >>> import_extra("json", "hf", "tables").loads("[1]")
    [1]
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_extra(package or module.partition(".")[0], extra, purpose) from error
