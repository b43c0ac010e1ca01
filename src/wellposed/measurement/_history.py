"""Numbers of the measured steps of a training, eight bytes each."""

from __future__ import annotations

from array import array
from collections.abc import Mapping


class History:
    """Rows of named numbers; names are stored once for each set of names."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._rows: list[tuple[int, tuple[str, ...], array[float]]] = []

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Keep the numbers of one step."""
        names = tuple(numbers)
        names = self._names.setdefault(names, names)
        self._rows.append((step, names, array("d", numbers.values())))

    def rows(self) -> list[dict[str, float]]:
        """Return every step as a dictionary with its ``"step"``, oldest first."""
        return [
            {"step": step, **dict(zip(names, values, strict=True))}
            for step, names, values in self._rows
        ]
