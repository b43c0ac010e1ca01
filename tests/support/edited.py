"""Change a JSON file in place."""

import json
from contextlib import contextmanager


@contextmanager
def edited(file):
    """Give the object of a JSON file, and write back what became of it."""
    record = json.loads(file.read_text())
    yield record
    file.write_text(json.dumps(record), encoding="utf-8")
