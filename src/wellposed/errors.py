"""The exception family of wellposed.

Each message says what failed, where (dotted path or ``file:line``), what was received and expected,
and what to do next. It lists all offenders of one call.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

from wellposed.install_line import install_line

MAX_LISTED = 10
MAX_MESSAGE = 8000
"""Longest message, in characters."""
MAX_SHOWN = 200
"""Longest value that a message repeats, in characters."""


class WellposedError(Exception):
    """Base of every error that wellposed raises on purpose; long values in messages are cut."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(_cut(part) if isinstance(part, str) else part for part in arguments))


_VALUE = re.compile(rf"""(?<!\w)(['"]).*?\1(?!\w)|\S{{{MAX_SHOWN + 1},}}""")


def shown_value(value: str) -> str:
    """Return the start and end of a value, at most `MAX_SHOWN` characters in all."""
    return value if len(value) <= MAX_SHOWN else f"{value[: MAX_SHOWN - 43]}...{value[-40:]}"


def _cut(message: str) -> str:
    message = _VALUE.sub(lambda match: shown_value(match[0]), message)
    left_out = len(message) - MAX_MESSAGE
    half = MAX_MESSAGE // 2
    if left_out <= 0:
        return message
    return f"{message[:half]} ... {left_out:,} characters ... {message[-half:]}"


class RoleNotFoundError(WellposedError, ValueError):
    """No weight of the model has the requested role (query, key, feed-forward, ...)."""


class ShapeError(WellposedError, ValueError):
    """A tensor or size does not fit: wrong rank, heads do not divide the width, too long."""


class NotLipschitzError(WellposedError, ValueError):
    """The map has no global Lipschitz constant, so the certificate does not exist."""


class UnsoundBoundError(WellposedError, RuntimeError):
    """The cross-check of a certificate found a slope above the bound: its rule is wrong."""


class NotContractiveError(WellposedError, ValueError):
    """No bound below 1 is known, so a fixed point cannot invert the residual block."""


class ConvergenceError(WellposedError, RuntimeError):
    """An iteration did not converge, or a loss became non-finite."""


class DataError(WellposedError, ValueError):
    """A data file or row is malformed; the message contains ``file:line``."""


class ConfigError(WellposedError, ValueError):
    """A configuration value, name or combination is not usable."""


class CheckpointError(WellposedError, RuntimeError):
    """A checkpoint is incomplete, damaged, or belongs to another configuration."""


def nearest_names(name: str, names: Iterable[str], *, count: int = 3) -> list[str]:
    """Return at most ``count`` similar names, nearest first, none far less similar than that.

    >>> nearest_names("post_nl", ["post_ln", "pre_ln", "rezero", "oc1"])
    ['post_ln']
    """
    close = difflib.get_close_matches(name, list(names), n=count, cutoff=0.0)
    likeness = [difflib.SequenceMatcher(None, n, name).ratio() for n in close]
    return [n for n, like in zip(close, likeness, strict=True) if like >= 0.7 * likeness[0]]


def unknown_name(kind: str, name: str, names: Iterable[str]) -> ConfigError:
    """Build the error for a name that is not registered; it lists at most three near ones."""
    names = list(names)
    name = name if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]}..."
    hint = f"expected one of {shortened(names)}" if names else f"no {kind} is registered"
    if difflib.get_close_matches(name, names, cutoff=0.25):
        hint = f"nearest: {', '.join(nearest_names(name, names))}"
    return ConfigError(f"unknown {kind} {name!r}; {hint}")


OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
"""Phrases in errors of torch about memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, here or on a device."""
    text = str(error).lower()
    torch_says = isinstance(error, RuntimeError) and any(words in text for words in OUT_OF_MEMORY)
    return isinstance(error, MemoryError) or torch_says or "OutOfMemoryError" in _kinds(error)


def _kinds(error: BaseException) -> set[str]:
    """Return the names of an error's classes; torch's are not imported here."""
    return {kind.__name__ for kind in type(error).__mro__}


_RESOURCES = {"AcceleratorError", "DistError"}
"""Errors of torch, by name, that say nothing about what was called."""


def is_about_resources(error: BaseException) -> bool:
    """Return whether an error tells of memory, recursion or a device, not of what was called.

    Handlers that turn any error into a note or a refusal must raise these again, or those of
    `is_out_of_memory` at least; a test looks at each of them.

    >>> is_about_resources(MemoryError()), is_about_resources(ValueError("bad shape"))
    (True, False)
    """
    is_deep = isinstance(error, RecursionError)
    return is_out_of_memory(error) or is_deep or bool(_RESOURCES & _kinds(error))


def listed(offenders: Sequence[str]) -> str:
    """Join offenders one to a line: the first ten, then the number of others."""
    lines = [f"  {offender}" for offender in offenders[:MAX_LISTED]]
    if len(offenders) > MAX_LISTED:
        lines.append(f"  ... and {len(offenders) - MAX_LISTED} more")
    return "\n".join(lines)


def shortened(names: Sequence[str]) -> str:
    """Join names in one line: the first ten, then the number of others."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{', '.join(names[:MAX_LISTED])}{more}"


EXTRAS = {
    "hf": ("transformers", "accelerate", "tokenizers", "safetensors", "huggingface-hub"),
    "lightning": ("lightning",),
    "plots": ("matplotlib",),
    "lab": ("filelock", "docstring-parser", "rich", "tqdm", "tomli-w", "numpy"),
    "compare": ("scipy", "jinja2"),
    "translation": ("sacrebleu",),
    "datasets": ("datasets",),
    "images": ("pillow",),
}
"""Optional packages by the extra that installs them: of `wellposed`, then of `wellposed-lab`."""
_OF_THE_LIBRARY = ("hf", "lightning", "plots")
_MODULES: dict[str, str] = {"pillow": "PIL", "huggingface-hub": "huggingface_hub"}
"""Modules whose name is not their package's."""


def extra_line(extra: str) -> str:
    """Return the line that installs an extra on this machine."""
    if extra in _OF_THE_LIBRARY:
        return install_line("wellposed", extra)
    return install_line("wellposed-lab", "" if extra == "lab" else extra)


def missing_extra(package: str, extra: str, purpose: str) -> ConfigError:
    """Build the error for an optional dependency that is not installed."""
    return ConfigError(
        f"{purpose} need the package {package!r}, which is not installed; run: {extra_line(extra)}"
    )


def missing_module(name: str, purpose: str) -> ConfigError | None:
    """Build the error for a module that is missing, or None if no extra installs it."""
    modules = {module: package for package, module in _MODULES.items()}
    package = modules.get(name, name.replace("_", "-"))
    extra = next((extra for extra, packages in EXTRAS.items() if package in packages), None)
    return missing_extra(package, extra, purpose) if extra else None


def import_extra(module: str, extra: str, purpose: str, *, package: str = "") -> Any:
    """Import a module of an extra; `ConfigError` that names the extra if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_extra(package or module.partition(".")[0], extra, purpose) from error


def require_extras(extras: Sequence[str], purpose: str) -> None:
    """Raise `ConfigError` for the first package of the extras that is not installed."""
    for extra in extras:
        for package in EXTRAS[extra]:
            module = _MODULES.get(package) or package.replace("-", "_")
            if find_spec(module) is None:
                raise missing_extra(package, extra, purpose)
