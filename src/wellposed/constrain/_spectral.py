"""The set of matrices whose spectral norm is proved to be at most a bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from wellposed.constrain._matrix import ConstrainedMatrix
from wellposed.constrain._select import WeightSlice
from wellposed.constrain._set import MatrixSet
from wellposed.linalg import (
    Retraction,
    Workspace,
    cap_spectral_norms_,
    certified_spectral_norm,
    is_sharded,
    read,
    write_,
)


@dataclass(frozen=True)
class Spectral(MatrixSet):
    """``|W|_2 <= size``, proved after each step."""

    decays = True
    is_oriented = False
    stacked = 2**16

    @classmethod
    def _of(cls, size: float, place: WeightSlice) -> Self:
        """Return a set without tolerance: its bound is proved."""
        del place
        return cls(size)

    def error(self, matrix: Tensor) -> float:
        """Measure ``max(0, |W|_2 / size - 1)`` with the certified norm."""
        return max(0.0, float(certified_spectral_norm(matrix)) / self.size - 1.0)

    def _spectral_error(self, matrix: Tensor) -> float:
        """Return `error`, which is by singular values."""
        return self.error(matrix)

    def nearest(self, matrix: Tensor) -> Tensor:
        """Cap the singular values."""
        return self._nearest_of(matrix[None])[2][0]

    def _nearest_of(self, stack: Tensor) -> tuple[list[float], list[float], Tensor, list[float]]:
        """Do as the base class; the proof as stored leaves no error."""
        inside = stack.clone()
        caps = cap_spectral_norms_(list(inside.unbind()), bound=self.size, nearest=True)
        before = [max(0.0, cap.before / self.size - 1.0) for cap in caps]
        return [self.size] * len(stack), before, inside, [0.0] * len(stack)

    def retract(self, matrices: Sequence[ConstrainedMatrix], work: Workspace) -> Retraction:
        """Cap the singular values of all; report the largest."""
        values = [matrix.value for matrix in matrices]
        gathered = [read(value) for value in values]
        proved = [matrix.proved for matrix in matrices]
        capped = cap_spectral_norms_(gathered, bound=self.size, before=proved, workspace=work)
        for matrix, cap in zip(matrices, capped, strict=True):
            matrix.proved = cap.before
        if is_sharded(values[0]):
            work.write(lambda: write_(values[0], gathered[0]))
        return Retraction(*max(capped, key=lambda cap: cap.before))
