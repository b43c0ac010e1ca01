"""What an error says, part by part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from wellposed.errors import DataError, WellposedError


@contextmanager
def refused(*parts: object, kind: type[WellposedError] = DataError) -> Iterator[None]:
    """Expect an error of ``kind`` that holds every one of ``parts``."""
    with pytest.raises(kind) as caught:
        yield
    for part in parts:
        assert str(part) in str(caught.value)
