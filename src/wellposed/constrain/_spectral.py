"""The set of matrices whose spectral norm is proved to be at most a bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from wellposed.constrain._inside import keep_copy, norms_since_proof, rooms_for
from wellposed.constrain._matrix import ConstrainedMatrix
from wellposed.constrain._select import WeightSlice
from wellposed.constrain._set import MatrixSet
from wellposed.linalg import (
    Retraction,
    SpectralCap,
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
        """Cap the singular values of all; report the largest.

        On a CPU, where a read is free, those that their step cannot have taken outside are passed.
        """
        if not work.is_reading or is_sharded(matrices[0].value):
            return Retraction(*max(self._cap(matrices, work), key=_norm))
        sure = norms_since_proof(matrices, self.size)
        caps = [SpectralCap("inside", norm) for norm in sure.values()]
        if rest := [matrix for matrix in matrices if matrix not in sure]:
            rooms = rooms_for(rest, self.size)
            capped = self._cap(rest, work, rooms=rooms)
            for matrix, cap, room in zip(rest, capped, rooms, strict=True):
                keep_copy(matrix, cap.before, room)
            caps += capped
        return Retraction(*max(caps, key=_norm))

    def _cap(
        self,
        matrices: Sequence[ConstrainedMatrix],
        work: Workspace,
        *,
        rooms: Sequence[float] | None = None,
    ) -> list[SpectralCap]:
        """Cap the singular values, and keep the proved norms as the start of the next search."""
        values = [matrix.value for matrix in matrices]
        gathered = [read(value) for value in values]
        proved = [matrix.proved for matrix in matrices]
        capped = cap_spectral_norms_(
            gathered, bound=self.size, before=proved, rooms=rooms, workspace=work
        )
        for matrix, cap in zip(matrices, capped, strict=True):
            matrix.proved = cap.before
        if is_sharded(values[0]):
            work.write(lambda: write_(values[0], gathered[0]))
        return capped


def _norm(cap: SpectralCap) -> float:
    return cap.before
