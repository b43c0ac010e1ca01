"""The sets that leave the directions free: spectral norm at most a bound, and columns of one
length."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from wellposed.constrain._batch import storage_key, write_back_
from wellposed.constrain._report import ConstrainedWeight
from wellposed.constrain._select import Candidate
from wellposed.constrain._weight import Weight
from wellposed.errors import ConvergenceError
from wellposed.linalg import Retraction, Workspace, cap_spectral_norms_, certified_spectral_norm
from wellposed.linalg.sharded import is_sharded, read, write_


class ProjectedWeight(Weight):
    """A matrix that steps by its own gradient and is projected after it, with nothing kept in
    between."""

    is_steered = False
    tolerance = 0.0
    """The error up to which a matrix counts as one of the set already."""

    @abstractmethod
    def error_of(self, matrix: Tensor) -> float:
        """Measure how far a matrix is from the set."""

    @abstractmethod
    def nearest(self) -> tuple[Tensor, float]:
        """Return the matrix of the set to start from, and the error of the present one."""

    @property
    def batch_key(self) -> object | None:
        """Shape, storage and size; sharded matrices are worked on one at a time."""
        return None if is_sharded(self.parameter) else storage_key(self)

    def error(self) -> float:
        """Measure how far the matrix, as stored, is from the set, in float64."""
        return self.error_of(read(self.value))

    def start(self, *, dry_run: bool) -> ConstrainedWeight:
        """Move the matrix into the set, unless it is there, and tell how far."""
        whole = read(self.value).to(torch.float64, copy=True)
        inside, before = self.nearest()
        moved = inside.double() - whole
        if not dry_run and before > self.tolerance:
            write_(self.value, inside)
        return ConstrainedWeight(
            path=self.path,
            shape=(whole.shape[0], whole.shape[1]),
            gain=self.gain,
            moved_frobenius=_ratio(moved.norm(), whole.norm()),
            moved_spectral=_ratio(
                torch.linalg.matrix_norm(moved, 2), torch.linalg.matrix_norm(whole, 2)
            ),
            error_before=before,
            error_after=self.error_of(inside),
            also=self.also,
        )

    def project_gradient_(self, _work: Workspace, /) -> None:
        """Leave the gradient as it is."""

    @classmethod
    def project_gradients_(cls, _weights: Sequence[Self], _work: Workspace, /) -> None:
        """Leave the gradients as they are."""

    def remember_(self, *, decayed: bool) -> None:
        """Keep nothing."""

    def restore_(self) -> None:
        """Undo nothing."""

    def claim_state(self) -> bool:
        """Restart nothing: moments are in the coordinates of the weight."""
        return False

    def mark_state(self, drift: float) -> None:
        """Note nothing."""

    def release_state(self) -> None:
        """Restart nothing."""


class SpectralWeight(ProjectedWeight):
    """``|W|_2 <= gain``, proved after each step."""

    decays = True

    def error_of(self, matrix: Tensor) -> float:
        """Measure ``max(0, |W|_2 / gain - 1)`` with the certified norm."""
        return max(0.0, float(certified_spectral_norm(matrix)) / self.gain - 1.0)

    def nearest(self) -> tuple[Tensor, float]:
        """Cap the singular values; what is proved inside stays as it is, so that a resumed run goes
        on from it."""
        inside = read(self.value).clone()
        before = self.error_of(inside)
        if before > 0.0:
            cap_spectral_norms_([inside], bound=self.gain, nearest=True)
        return inside, before

    def retract_(self, work: Workspace, /) -> Retraction:
        """Cap the singular values."""
        if not is_sharded(self.parameter):
            return self.retract_batch_([self], work)
        whole = read(self.value)
        (capped,) = cap_spectral_norms_([whole], bound=self.gain)
        write_(self.value, whole)
        return Retraction(capped.method, capped.before)

    @classmethod
    def retract_batch_(cls, weights: Sequence[Self], _work: Workspace, /) -> Retraction:
        """Cap the singular values of all; the largest is reported."""
        capped = cap_spectral_norms_([weight.value for weight in weights], bound=weights[0].gain)
        return Retraction(*max(capped, key=lambda cap: cap.before))


class ColumnWeight(ProjectedWeight):
    """Columns of length ``gain``: the images of the basis vectors, and of an embedding the vectors
    of its tokens."""

    def __init__(
        self, place: Candidate, optimizer: Optimizer, size: float, also: tuple[str, ...] = ()
    ) -> None:
        super().__init__(place, optimizer, size, also)
        # A rounded column is off by the rounding of its entries, and of the sum of squares that
        # measures it.
        measured = len(self.value) * torch.finfo(torch.float64).eps
        self.tolerance = 2.0 * torch.finfo(self.parameter.dtype).eps + measured

    @property
    def batch_key(self) -> object | None:
        """As of every projected matrix; one with a vector of padding is worked on by itself."""
        return None if self.place.padding is not None else super().batch_key

    def error_of(self, matrix: Tensor) -> float:
        """Measure ``max_j | |W e_j| / gain - 1 |``; a vector of padding may be zero."""
        return float((self._lengths(matrix) / self.gain - 1.0).abs().max())

    def nearest(self) -> tuple[Tensor, float]:
        """Divide each column by its length; a matrix within rounding stays as it is."""
        whole = read(self.value)
        before = self.error_of(whole)
        return (whole if before <= self.tolerance else self._normalised(whole)), before

    def retract_(self, _work: Workspace, /) -> Retraction:
        """Divide each column by its length."""
        write_(self.value, self._normalised(read(self.value)))
        return Retraction("columns")

    @classmethod
    def retract_batch_(cls, weights: Sequence[Self], _work: Workspace, /) -> Retraction:
        """Divide each column of each matrix by its length."""
        write_back_(
            weights, weights[0]._normalised(torch.stack([weight.value for weight in weights]))
        )
        return Retraction("columns")

    def _normalised(self, matrices: Tensor) -> Tensor:
        """Return (..., rows, columns) with columns of the length of this set."""
        lengths = self._lengths(matrices)
        has_none = ~(torch.isfinite(lengths) & (lengths > 0.0))
        if bool(has_none.any()):
            columns = torch.nonzero(has_none)[..., -1].tolist()
            raise ConvergenceError(
                f"{len(columns)} of {lengths.numel()} columns are zero or not finite and have no"
                f" direction: {columns[:5]}"
            )
        return (matrices.double() * (self.gain / lengths).unsqueeze(-2)).to(matrices.dtype)

    def _lengths(self, matrices: Tensor) -> Tensor:
        """Return the lengths of the columns; that of a zero vector of padding as the one it should
        have."""
        lengths = torch.linalg.vector_norm(matrices, dim=-2, dtype=torch.float64)
        if self.place.padding is not None and float(lengths[self.place.padding]) == 0.0:
            lengths[self.place.padding] = self.gain
        return lengths


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part / whole.clamp_min(torch.finfo(whole.dtype).tiny))
