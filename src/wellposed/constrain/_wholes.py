"""Whole matrices of parameters that lie in shards: one gather for all matrices of a parameter."""

from __future__ import annotations

from torch import Tensor

from wellposed.constrain._weight_slice import WeightSlice
from wellposed.linalg import read


class Wholes:
    """Gathers each parameter in shards once for all its matrices that are read one after another."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, Tensor] | None = None

    def matrix(self, parameter: Tensor, part: WeightSlice) -> Tensor:
        """Return the whole matrix, detached; of a parameter in shards every rank must call it."""
        if self._last is None or self._last[0] is not parameter:
            self._last = None  # frees it before the next arrives
            self._last = parameter, read(parameter)
        return part.matrix_in(self._last[1])
