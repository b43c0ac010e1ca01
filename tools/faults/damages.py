"""Ways in which a file is damaged; each says whether it could be done to this file."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

LONG_NUMBER = b"9" * 5000
DEPTH = 100_000
Damage = Callable[[bytes, random.Random], bytes | None]


def _flip(data: bytes, draw: random.Random) -> bytes | None:
    if not data:
        return None
    place = draw.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :]


def _cut(data: bytes, draw: random.Random) -> bytes | None:
    return data[: draw.randrange(len(data))] if data else None


def _zeroed(data: bytes, draw: random.Random) -> bytes | None:
    if not data:
        return None
    start, size = draw.randrange(len(data)), draw.choice((16, 512, 4096))
    return data[:start] + bytes(len(data[start : start + size])) + data[start + size :]


def _not_utf8(data: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(data) + 1)
    return data[:place] + b"\xff\xfe\xed\xa0\x80" + data[place:]


def _long_number(data: bytes, draw: random.Random) -> bytes | None:
    numbers = list(re.finditer(rb"\d+", data[:100_000]))
    if not numbers:
        return None
    found = draw.choice(numbers)
    return data[: found.start()] + LONG_NUMBER + data[found.end() :]


def _deep(data: bytes, draw: random.Random) -> bytes:
    opening = draw.choice((b"[", b'{"a":', b"a.", b"["))
    return opening * DEPTH if draw.random() < 0.5 else data[: len(data) // 2] + opening * DEPTH


def _ill_typed(data: bytes, draw: random.Random) -> bytes | None:
    """Put a value of another type in the place of a random one."""
    lines = data.split(b"\n")
    row = draw.randrange(len(lines))
    for text, before, after in (
        (data, b"", b""),
        (lines[row], b"\n".join(lines[:row]), b"\n".join(lines[row + 1 :])),
    ):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        changed = json.dumps(_other(value, draw)).encode()
        return b"\n".join(part for part in (before, changed, after) if part)
    return None


_VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1.5,
    1e300,
    10**30,
    "",
    "x",
    [],
    {},
    [None],
    {"a": "b"},
    "\ud800",
    "\n",
    float("nan"),
)


def _other(value: Any, draw: random.Random) -> Any:
    if isinstance(value, (dict, list)) and value and draw.random() < 0.9:
        key = draw.choice(list(value) if isinstance(value, dict) else list(range(len(value))))
        changed = dict(value) if isinstance(value, dict) else list(value)
        if draw.random() < 0.15:
            del changed[key]
        else:
            changed[key] = _other(value[key], draw)
        return changed
    return draw.choice(_VALUES)


DAMAGES: dict[str, Damage | None] = {
    "one bit": _flip,
    "one bit more": _flip,
    "cut": _cut,
    "a zeroed block": _zeroed,
    "emptied": lambda _, __: b"",
    "twice": lambda data, _: data + data,
    "noise": lambda data, draw: draw.randbytes(max(8, min(len(data), 4096))),
    "not UTF-8": _not_utf8,
    "5,000 digits": _long_number,
    "deep": _deep,
    "ill-typed": _ill_typed,
    "ill-typed twice": lambda data, draw: (
        None if (once := _ill_typed(data, draw)) is None else _ill_typed(once, draw)
    ),
    "deleted": None,
    "swapped": None,
}
"""Every damage; of those without a function the file itself is needed."""


def apply(name: str, file: Path, draw: random.Random) -> bool:
    """Damage a file; return False where nothing was changed."""
    data = file.read_bytes()
    if name == "deleted":
        file.unlink()
        return True
    if name == "swapped":
        others = [path for path in sorted(file.parent.iterdir()) if path.is_file() and path != file]
        other = draw.choice([path for path in others if path.read_bytes() != data] or [file])
        if other == file:
            return False
        shutil.copyfile(other, file)
        return True
    damage = DAMAGES[name]
    assert damage is not None
    changed = damage(data, draw)
    if changed is None or changed == data:
        changed = _flip(data, draw)
    if changed is None:
        return False
    file.write_bytes(changed)
    return True
