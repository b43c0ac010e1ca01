"""Prove without a product that a weight is inside its bound: by its distance from a proved copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

# Weights up to this many bounds are passed. Above it the rounding of a proof, up to 4 % of the
# squared norm, could decide otherwise, and a resumed run would differ from one that went on.
_SURE = 0.95
# A copy is kept if so many steps of the last size fit between the proved norm and `_SURE` bounds.
_STEPS = 2.0
# Sums of squares in float64, and the differences in float32 below them, are rounded by less.
_MARGIN = 1e-6


# Steps without a try after tries that failed, at most: a weight at its bound stays there for long.
_LONGEST_PAUSE = 16


class Pause(NamedTuple):
    """When to look for a lower norm again."""

    left: int = 0
    """Steps before the next try."""
    last: int = 0
    """The pause after the last failed try."""


class ProvedCopy(NamedTuple):
    """A copy of a weight that nobody else writes to, and a proved bound on its spectral norm."""

    matrix: Tensor
    norm: float


class Memory(Protocol):
    """State of a set that keeps proved copies."""

    proved_copy: ProvedCopy | None
    """The matrix when it was last proved, if its steps leave it inside for a while."""
    pause: Pause
    """When to look for a norm that leaves room for a copy."""


class Steps(Protocol):
    """The parts of a `ConstrainedMatrix` that are read here."""

    spare: list[Tensor]

    @property
    def memory(self) -> Memory:
        """The state between steps."""
        ...

    @property
    def value(self) -> Tensor:
        """The matrix as it is."""
        ...


Matrix = TypeVar("Matrix", bound=Steps)


def norms_since_proof(matrices: Sequence[Matrix], bound: float) -> dict[Matrix, float]:
    """Return bounds on the norms of those that are surely inside: ``|W| <= |K| + |W - K|_F``.

    K is the copy that was proved, so it does not matter who changed W since, or how often.

    Cost: two passes over each weight that has a copy, and one read.
    """
    pairs: dict[Matrix, ProvedCopy] = {}
    for matrix in matrices:
        proved = matrix.memory.proved_copy
        if proved is not None and _fits(proved.matrix, matrix.value):
            pairs[matrix] = proved

    moved = _distances([(matrix.value, copy.matrix) for matrix, copy in pairs.items()])
    norms = {
        matrix: copy.norm + distance
        for (matrix, copy), distance in zip(pairs.items(), moved, strict=True)
    }
    # A weight that is not finite has a distance that is not, and is left to the proof.
    return {matrix: norm for matrix, norm in norms.items() if norm <= _SURE * bound}


def rooms_for(matrices: Sequence[Steps], bound: float) -> list[float]:
    """Return of each the norm that leaves room for the next steps; 0 if none is to be looked for.

    None is if the step is not known, and for up to 16 steps after a try that failed.
    The step is the distance from the copy that undoes it. It need not be exact: it decides only
    whether a lower norm is worth a proof.
    """
    rooms: list[float] = []
    for matrix in matrices:
        pause = matrix.memory.pause
        if pause.left:
            matrix.memory.pause = pause._replace(left=pause.left - 1)
            rooms.append(0.0)
        else:
            rooms.append(max(0.0, _SURE * bound - _STEPS * _step(matrix)))
    return rooms


def keep_copy(matrix: Steps, norm: float, room: float) -> None:
    """Keep a copy of a weight of this proved norm, if that leaves room for steps."""
    memory = matrix.memory
    old = memory.proved_copy
    # While the copy is written it is no proof of anything.
    memory.proved_copy = None
    if not norm <= room:
        if room:
            wait = min(2 * memory.pause.last + 1, _LONGEST_PAUSE)
            memory.pause = Pause(wait, wait)
        return

    memory.pause = Pause()
    buffer = torch.empty_like(matrix.value)
    if old is not None and _fits(old.matrix, matrix.value):
        buffer = old.matrix
    buffer.copy_(matrix.value)
    memory.proved_copy = ProvedCopy(buffer, norm)


def _step(matrix: Steps) -> float:
    value = matrix.value
    if len(matrix.spare) != 1 or not _fits(matrix.spare[0], value):
        return math.inf
    return float(torch.dist(value, matrix.spare[0]))


def _fits(copy: Tensor, value: Tensor) -> bool:
    return (copy.shape, copy.dtype, copy.device) == (value.shape, value.dtype, value.device)


def _distances(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """Bound ``|W - K|_F`` of each pair from above, rounding included."""
    if not pairs:
        return []
    norms = [_distance(value, copy) for value, copy in pairs]
    # Differences that are flushed to zero are below the smallest normal number.
    return [
        norm * (1.0 + _MARGIN) + math.sqrt(value.numel()) * torch.finfo(value.dtype).tiny
        for norm, (value, _) in zip(torch.stack(norms).tolist(), pairs, strict=True)
    ]


def _distance(value: Tensor, copy: Tensor) -> Tensor:
    if value.dtype in (torch.float16, torch.bfloat16):
        value = value.float()
        copy = copy.float()
    return torch.linalg.vector_norm(value - copy, dtype=torch.float64)
