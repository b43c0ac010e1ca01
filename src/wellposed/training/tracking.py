"""The old place of `wellposed.training.Tracking`, until 0.4."""

from __future__ import annotations

import warnings
from typing import Any

import wellposed.training.loop.tracking


def __getattr__(name: str) -> Any:
    found = getattr(wellposed.training.loop.tracking, name)
    warnings.warn(
        "wellposed.training.tracking is now wellposed.training.loop.tracking; Tracking can be"
        " imported from wellposed.training",
        FutureWarning,
        stacklevel=2,
    )
    return found
