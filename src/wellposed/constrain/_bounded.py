"""The sets that leave the directions free: spectral norm at most a bound, and columns of one length."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from wellposed.constrain._select import Candidate
from wellposed.constrain._weight import Weight
from wellposed.errors import ConvergenceError
from wellposed.linalg import Retraction, Workspace, cap_spectral_norm_, certified_spectral_norm
from wellposed.linalg.sharded import is_sharded, read, write_


class SpectralWeight(Weight):
    """``|W|_2 <= gain``, proved after each step."""

    decays = True

    def error(self) -> float:
        """Measure ``max(0, |W|_2 / gain - 1)`` with the certified norm."""
        return self.error_of(read(self.value))

    def error_of(self, matrix: Tensor) -> float:
        """The error of any matrix."""
        return max(0.0, float(certified_spectral_norm(matrix)) / self.gain - 1.0)

    def nearest(self) -> tuple[Tensor, float]:
        """Cap the singular values; what is proved inside stays as it is, so that a resumed run goes on from it."""
        inside = read(self.value).clone()
        before = self.error_of(inside)
        if before > 0.0:
            cap_spectral_norm_(inside, bound=self.gain)
        return inside, before

    def retract_(self, _work: Workspace, /) -> Retraction:
        """Cap the singular values."""
        whole = read(self.value)
        capped = cap_spectral_norm_(whole, bound=self.gain)
        if is_sharded(self.parameter):
            write_(self.value, whole)
        return Retraction(capped.method, capped.before)


class ColumnWeight(Weight):
    """Columns of length ``gain``: the images of the basis vectors, and of an embedding the vectors of its tokens."""

    def __init__(self, place: Candidate, optimizer: Optimizer, size: float, also: tuple[str, ...] = ()) -> None:
        super().__init__(place, optimizer, size, also)
        # A rounded column is off by the rounding of its entries, and of the sum of squares that measures it.
        measured = len(self.value) * torch.finfo(torch.float64).eps
        self.tolerance = 2.0 * torch.finfo(self.parameter.dtype).eps + measured

    def error(self) -> float:
        """Measure ``max_j | |W e_j| / gain - 1 |`` in float64; a vector of padding may be zero."""
        return self.error_of(read(self.value))

    def error_of(self, matrix: Tensor) -> float:
        """The error of any matrix."""
        lengths = self._lengths(matrix)
        return float((lengths / self.gain - 1.0).abs().max())

    def nearest(self) -> tuple[Tensor, float]:
        """Divide each column by its length; a matrix within rounding stays as it is."""
        whole = read(self.value)
        before = self.error_of(whole)
        return (whole if before <= self.tolerance else self._normalised(whole)), before

    def retract_(self, _work: Workspace, /) -> Retraction:
        """Divide each column by its length."""
        write_(self.value, self._normalised(read(self.value)))
        return Retraction("columns")

    def _normalised(self, matrix: Tensor) -> Tensor:
        lengths = self._lengths(matrix)
        if not bool((torch.isfinite(lengths) & (lengths > 0.0)).all()):
            columns = torch.nonzero(~(torch.isfinite(lengths) & (lengths > 0.0))).flatten().tolist()
            raise ConvergenceError(
                f"{len(columns)} of {len(lengths)} columns are zero or not finite and have no direction: {columns[:5]}"
            )
        return (matrix.double() * (self.gain / lengths)).to(matrix.dtype)

    def _lengths(self, matrix: Tensor) -> Tensor:
        """Return the lengths of the columns; that of a zero vector of padding as the one it should have."""
        lengths = torch.linalg.vector_norm(matrix.double(), dim=0)
        if self.place.padding is not None and float(lengths[self.place.padding]) == 0.0:
            lengths[self.place.padding] = self.gain
        return lengths
