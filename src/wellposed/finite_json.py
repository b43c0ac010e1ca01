"""Strict JSON: NaN and infinities are written as null, and refused when read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

LONGEST_INTEGER = 20
"""Characters of a 64-bit integer, sign included."""


def to_json(value: Any, *, indent: int | None = None) -> bytes:
    """Return ``value`` as strict JSON with a final newline; NaN and infinities become null."""
    return (json.dumps(_finite(value), indent=indent, allow_nan=False) + "\n").encode()


def from_json(data: bytes | str, *, any_number: bool = False) -> Any:
    """Return JSON text as a value; `ValueError` if malformed, too deep, not finite or too long."""
    try:
        if any_number:
            return json.loads(data)
        return json.loads(data, parse_int=_int, parse_float=_float, parse_constant=_float)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is no finite number")
    return value


def _int(text: str) -> int:
    if len(text) > LONGEST_INTEGER:
        raise ValueError(f"an integer of {len(text)} digits, expected 64 bits")
    return int(text)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
