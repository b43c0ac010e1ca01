"""The stub task as a fixture."""

from __future__ import annotations

from types import ModuleType

import pytest
from tests.support import stub_task


@pytest.fixture(scope="session")
def stub() -> ModuleType:
    """Return the module of the smallest task."""
    return stub_task
