"""Slow reference implementations that these tests compare with."""

from tests.support.jacobians import reference  # noqa: F401
from tests.support.searched_once import searched_once  # noqa: F401
