"""Slow reference implementations that these tests compare with."""

from tests.support.jacobians import reference  # noqa: F401
