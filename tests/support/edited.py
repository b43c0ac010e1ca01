"""Change a JSON file in place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def edited(file: Path) -> Iterator[dict[str, Any]]:
    """Give the object of a JSON file, and write back what became of it."""
    record = json.loads(file.read_text())
    yield record
    file.write_text(json.dumps(record), encoding="utf-8")
