"""Sequences whose elements are made when they are asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TypeVar, overload

Element = TypeVar("Element")


class Rows(Sequence[Element]):
    """A sequence from its length and `_row`, which makes the element of an index; a slice makes a
    list.

    >>> class Squares(Rows[int]):
    ...     def __len__(self) -> int:
    ...         return 4
    ...
    ...     def _row(self, index: int) -> int:
    ...         return range(4)[index] ** 2
    >>> Squares()[-1], Squares()[1:3], list(Squares())
    (9, [1, 4], [0, 1, 4, 9])
    """

    @abstractmethod
    def _row(self, index: int) -> Element:
        """Return the element of an index; a negative one counts from the end."""

    @overload
    def __getitem__(self, index: int) -> Element: ...
    @overload
    def __getitem__(self, index: slice) -> list[Element]: ...
    def __getitem__(self, index: int | slice) -> Element | list[Element]:
        if isinstance(index, slice):
            return [self._row(i) for i in range(len(self))[index]]
        return self._row(index)

    def __iter__(self) -> Iterator[Element]:
        return (self._row(index) for index in range(len(self)))
