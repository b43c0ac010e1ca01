"""The old place of `wellposed.compare.variants`, until 0.4."""

from __future__ import annotations

import warnings
from typing import Any

import wellposed.compare.variants


def __getattr__(name: str) -> Any:
    found = getattr(wellposed.compare.variants, name)
    warnings.warn(
        "wellposed.recipes.variants is now wellposed.compare.variants; import it from there",
        FutureWarning,
        stacklevel=2,
    )
    return found
