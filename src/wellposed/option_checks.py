"""The names that options were declared with before 0.3: ``window: Size = 64`` of `wellposed.options` says the same."""

from __future__ import annotations

import warnings
from dataclasses import field
from typing import Any

from wellposed.options import Count, Positive, Rate, Size

COUNT, POSITIVE, RATE, SIZE = Count, Positive, Rate, Size


def option(default: Any, check: Any) -> Any:
    """Return a dataclass field whose values are checked; deprecated."""
    warnings.warn(
        "wellposed.option_checks.option(64, SIZE) goes in 0.4; write `window: Size = 64` with Size"
        " of wellposed.options, whose hint is checked",
        FutureWarning,
        stacklevel=2,
    )
    return field(default=default, metadata={"hint": check | None if default is None else check})
