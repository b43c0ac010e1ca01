"""The set of matrices whose spectral norm is proved to be at most a bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from torch import Tensor

from wellposed.constrain._matrix import ConstrainedMatrix
from wellposed.constrain._set import SETS, NearestMatrices
from wellposed.constrain._weight_slice import WeightSlice
from wellposed.constrain.sets._inside import (
    Pause,
    ProvedCopy,
    keep_copy,
    norms_since_proof,
    rooms_for,
)
from wellposed.constrain.sets._spectral_size import SpectralSize, excess
from wellposed.linalg import (
    Retraction,
    SpectralCap,
    Workspace,
    can_deflate,
    cap_spectral_norms_,
    deflate_,
    is_sharded,
    read,
    start_vectors,
    write_,
)

# Steps without a try at deflation after tries that failed, at most.
_LONGEST_WAIT = 32
# A weight with a largest singular value below this many bounds needs no deflation.
_NEAR_BOUND = 0.9


class TopVectors(NamedTuple):
    """Guesses of singular vectors for `deflate_`, and when to try them."""

    vectors: Tensor
    pause: int = 0
    """Steps before the next try."""
    wait: int = 0
    """The pause after the last failed try."""


@dataclass
class SpectralMemory:
    """State of one matrix from step to step, by which later steps are proved at a lower cost."""

    top_vectors: TopVectors | None = None
    """Vectors near the largest singular ones, if the last steps led outside the bound."""
    proved_copy: ProvedCopy | None = None
    """The matrix when it was last proved, if its steps leave it inside for a while."""
    pause: Pause = field(default_factory=Pause)
    """When to look for a norm that leaves room for a copy."""


@SETS.register("spectral")
@dataclass(frozen=True)
class Spectral(SpectralSize):
    """``|W|_2 <= size``, proved after each step."""

    decays = True
    is_oriented = False
    stacked = 2**16

    @classmethod
    def for_weight(cls, size: float, weight_slice: WeightSlice) -> Self:
        """Return a set without tolerance: its bound is proved."""
        del weight_slice
        return cls(size)

    def error(self, matrix: Tensor) -> float:
        """Measure ``max(0, |W|_2 / size - 1)`` with the certified norm."""
        return excess(matrix, self.size)

    def nearest(self, matrix: Tensor) -> Tensor:
        """Cap the singular values."""
        return self.nearest_stack(matrix[None]).matrices[0]

    def nearest_stack(self, stack: Tensor) -> NearestMatrices:
        """Cap the singular values of all; the proof as stored leaves no error."""
        inside = stack.clone()
        caps = cap_spectral_norms_(list(inside.unbind()), bound=self.size, nearest=True)
        before = [max(0.0, cap.before / self.size - 1.0) for cap in caps]
        return NearestMatrices([self.size] * len(stack), before, inside, [0.0] * len(stack))

    def memory(self) -> SpectralMemory:
        """Return the memory of a matrix of which nothing is proved yet."""
        return SpectralMemory()

    def retract(self, matrices: Sequence[ConstrainedMatrix], work: Workspace) -> Retraction:
        """Cap the singular values of all; report the largest.

        On a CPU, where a read is free, those that their step cannot have taken outside are passed.
        """
        if not work.is_reading or is_sharded(matrices[0].value):
            return Retraction(*max(self._cap(matrices, work), key=_norm))
        sure = norms_since_proof(matrices, self.size)
        caps = [SpectralCap("inside", norm) for norm in sure.values()]
        rest = [matrix for matrix in matrices if matrix not in sure]
        if rest:
            deflated = self._deflate(rest[0]) if len(rest) == 1 else None
            caps += self._cap_beside_copies(rest, work) if deflated is None else [deflated]
        return Retraction(*max(caps, key=_norm))

    def _cap_beside_copies(
        self, matrices: Sequence[ConstrainedMatrix], work: Workspace
    ) -> list[SpectralCap]:
        """Cap matrices, and prepare the cheaper tests and caps of later steps."""
        rooms = rooms_for(matrices, self.size)
        capped = self._cap(matrices, work, rooms=rooms)
        for matrix, cap, room in zip(matrices, capped, rooms, strict=True):
            keep_copy(matrix, cap.before, room)
            if matrix.memory.proved_copy is not None:
                matrix.memory.top_vectors = None

        if len(matrices) == 1 and capped[0].method == "polynomial":
            self._prepare_deflation(matrices[0])
        return capped

    def _prepare_deflation(self, matrix: ConstrainedMatrix) -> None:
        memory: SpectralMemory = matrix.memory
        if memory.top_vectors is None and can_deflate(matrix.value, self.size):
            memory.top_vectors = TopVectors(start_vectors(matrix.value))

    def _deflate(self, matrix: ConstrainedMatrix) -> SpectralCap | None:
        """Clip by the vectors of the last steps; None if there are none, or no proof."""
        memory: SpectralMemory = matrix.memory
        top = memory.top_vectors
        if top is None or not can_deflate(matrix.value, self.size):
            return None
        if top.pause:
            memory.top_vectors = top._replace(pause=top.pause - 1)
            return None

        norm, vectors, lengths = deflate_(matrix.value, top.vectors, bound=self.size)
        if norm == math.inf:
            wait = min(2 * top.wait + 1, _LONGEST_WAIT)
            memory.top_vectors = TopVectors(vectors, pause=wait, wait=wait)
            return None

        # A weight that is well inside is left to the test without products.
        memory.top_vectors = TopVectors(vectors) if lengths[0] > _NEAR_BOUND else None
        memory.proved_copy = None
        matrix.proved = norm
        return SpectralCap("inside" if norm <= self.size else "deflation", norm)

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
