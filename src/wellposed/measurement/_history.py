"""Numbers of the measured steps of a training, eight bytes each, up to a limit."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

# Numbers kept at most, 64 MiB: a thousand numbers of 8,000 steps.
MOST = 2**23


class History:
    """Rows of named numbers; names are stored once for each set of names."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._rows: list[tuple[int, tuple[str, ...], array[float]]] = []
        self._count = 0
        self.is_thinned = False
        """Whether rows were dropped."""

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Keep the numbers of one step; above `MOST` numbers, drop every second step before it."""
        names = tuple(numbers)
        names = self._names.setdefault(names, names)
        self._rows.append((step, names, array("d", numbers.values())))
        self._count += len(names)
        if self._count > MOST and len(self._rows) > 1:
            self._rows = self._rows[::-2][::-1]
            self._count = sum(len(row) for _, row, _ in self._rows)
            self.is_thinned = True

    def rows(self) -> list[dict[str, float]]:
        """Return every kept step as a dictionary with its ``"step"``, oldest first."""
        return [
            {"step": step, **dict(zip(names, values, strict=True))}
            for step, names, values in self._rows
        ]
