"""How far a call moved weights, as a line of the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping

FAR = 0.1
"""A weight that moves by more than this fraction of its norm causes a warning."""


def say_moves(logger: logging.Logger, did: str, moved: Mapping[str, float]) -> None:
    """Log ``|W' - W|_F / |W|_F`` by name; a warning if a weight moved by more than `FAR`."""
    line = f"{did}; none moved"
    far = sum(part > FAR for part in moved.values())
    if any(moved.values()):
        worst = max(moved, key=lambda name: moved[name])
        mean = sum(moved.values()) / len(moved)
        most = f"{moved[worst]:.2g} at most ({worst})"
        line = f"{did}; moved by {mean:.2g} of their norm on average, {most}"

    if far:
        line += (
            f"; {far} of {len(moved)} by more than a tenth: if they were trained before, the model"
            " now computes something else"
        )
    logger.log(logging.WARNING if far else logging.INFO, "%s", line)
