"""The parts of an error message."""

import functools
from contextlib import contextmanager

import pytest

from wellposed.errors import ConfigError, DataError, ShapeError


@contextmanager
def refused(*parts, kind=DataError):
    """Expect an error of ``kind`` that holds every one of ``parts``."""
    with pytest.raises(kind) as caught:
        yield caught
    for part in parts:
        assert str(part) in str(caught.value)


def refuses(kind, says, call, *arguments, **keywords):
    """Expect that the call raises ``kind`` with a message that the pattern ``says`` is found in, or
    each text of a tuple."""
    is_texts = isinstance(says, tuple)
    with refused(*says, kind=kind) if is_texts else pytest.raises(kind, match=says):
        call(*arguments, **keywords)


def each_refused(kind, calls):
    """Expect ``kind`` of every call, each listed under a pattern that its message holds."""
    for message, call in calls.items():
        with pytest.raises(kind, match=message):
            call()


bad_data = functools.partial(pytest.raises, DataError)
"""Expect a `DataError` whose message the pattern ``match`` is found in."""
bad_config = functools.partial(pytest.raises, ConfigError)
"""Expect a `ConfigError` whose message the pattern ``match`` is found in."""
bad_shape = functools.partial(pytest.raises, ShapeError)
"""Expect a `ShapeError` whose message the pattern ``match`` is found in."""
refuses_data = functools.partial(refuses, DataError)
"""`refuses` with a `DataError`."""
refuses_config = functools.partial(refuses, ConfigError)
"""`refuses` with a `ConfigError`."""
refuses_shape = functools.partial(refuses, ShapeError)
"""`refuses` with a `ShapeError`."""
