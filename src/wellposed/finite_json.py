"""JSON without NaN and infinities, which the format does not have, and read with one kind of
error."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def to_json(value: Any, *, indent: int | None = None) -> bytes:
    """Return ``value`` as strict JSON with a final newline; NaN and infinities become null.

    >>> to_json({"loss": float("inf"), "step": 3})
    b'{"loss": null, "step": 3}\\n'
    """
    return (json.dumps(_finite(value), indent=indent, allow_nan=False) + "\n").encode()


def from_json(data: bytes | str) -> Any:
    """Return the value of JSON text; whatever is wrong with it is a `ValueError`, nesting without
    end too.

    >>> from_json(b"[" * 100_000)
    Traceback (most recent call last):
    ...
    ValueError: nested too deeply
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
