"""The parts of a penalty in a tracker, at the steps at which they were computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from wellposed.trackers import TrackerLog


def summed_terms(terms: Mapping[str, float]) -> dict[str, float]:
    """Return the sums ``penalty/<strength>`` of a penalty's terms, and ``penalty/total``.

    >>> summed_terms({"key.encoder.0": 1.0, "key.encoder.1": 2.0})
    {'penalty/key': 3.0, 'penalty/total': 3.0}
    """
    row: dict[str, float] = {}
    for name, value in terms.items():
        strength = f"penalty/{name.partition('.')[0]}"
        row[strength] = row.get(strength, 0.0) + value
    return {**row, "penalty/total": sum(row.values())}


class TermsLog:
    """Writes the terms of the first call of every ``every`` steps; other calls read nothing."""

    def __init__(self, log_to: Any, every: int) -> None:
        self._log = TrackerLog(log_to, "OrthogonalityPenalty", "penalty/step")
        self._every = every
        self._last: int | None = None
        self.is_on = bool(self._log)

    @torch._disable_dynamo  # it reads numbers
    def write(self, penalty: Any, step: int) -> None:
        """Write the terms of the call at ``step``, which counts from 0, if they are due."""
        if self._last == step // self._every:
            return
        self._last = step // self._every
        terms = penalty.terms()
        numbered = {f"penalty/{name}": value for name, value in terms.items()}
        self._log.write({**summed_terms(terms), **numbered}, step + 1)
