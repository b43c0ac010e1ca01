"""The sets that leave the directions free: spectral norm at most a bound, and columns of one
length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from wellposed.constrain._select import Candidate
from wellposed.constrain._weight import Weight, write_back_
from wellposed.errors import ConvergenceError
from wellposed.linalg import Retraction, Workspace, cap_spectral_norms_, certified_spectral_norm
from wellposed.linalg.sharded import is_sharded, read, write_


class SpectralWeight(Weight):
    """``|W|_2 <= gain``, proved after each step; it steps by its own gradient."""

    decays = True

    def error_of(self, matrix: Tensor) -> float:
        """Measure ``max(0, |W|_2 / gain - 1)`` with the certified norm."""
        return max(0.0, float(certified_spectral_norm(matrix)) / self.gain - 1.0)

    def nearest(self, whole: Tensor) -> Tensor:
        """Cap the singular values."""
        inside = whole.clone()
        cap_spectral_norms_([inside], bound=self.gain, nearest=True)
        return inside

    @classmethod
    def retract_(cls, weights: Sequence[Self], _work: Workspace, /) -> Retraction:
        """Cap the singular values of all; the largest is reported."""
        first, matrices = weights[0], [read(weight.value) for weight in weights]
        capped = cap_spectral_norms_(matrices, bound=first.gain)
        if is_sharded(first.parameter):
            write_(first.value, matrices[0])
        return Retraction(*max(capped, key=lambda cap: cap.before))


class ColumnWeight(Weight):
    """Columns of length ``gain``: the images of the basis vectors, and of an embedding the vectors
    of its tokens; it steps by its own gradient."""

    def __init__(self, place: Candidate, optimizer: Optimizer, size: float) -> None:
        super().__init__(place, optimizer, size)
        # A rounded column is off by the rounding of its entries, and of the sum of squares that
        # measures it.
        measured = len(self.value) * torch.finfo(torch.float64).eps
        self.tolerance = 2.0 * torch.finfo(self.parameter.dtype).eps + measured

    @property
    def batch_key(self) -> tuple[object, ...] | None:
        """As of every matrix; one with a vector of padding is worked on by itself."""
        return None if self.place.padding is not None else super().batch_key

    def error_of(self, matrix: Tensor) -> float:
        """Measure ``max_j | |W e_j| / gain - 1 |``; a vector of padding may be zero."""
        return float((self._lengths(matrix) / self.gain - 1.0).abs().max())

    def nearest(self, whole: Tensor) -> Tensor:
        """Divide each column by its length."""
        lengths = self._lengths(whole)
        has_none = ~(torch.isfinite(lengths) & (lengths > 0.0))
        if bool(has_none.any()):
            columns = torch.nonzero(has_none)[..., -1].tolist()
            raise ConvergenceError(
                f"{len(columns)} of {lengths.numel()} columns are zero or not finite and have no"
                f" direction: {columns[:5]}"
            )
        return (whole.double() * (self.gain / lengths).unsqueeze(-2)).to(whole.dtype)

    @classmethod
    def retract_(cls, weights: Sequence[Self], _work: Workspace, /) -> Retraction:
        """Divide each column of each matrix by its length."""
        values = [read(weight.value) for weight in weights]
        stack = values[0][None] if len(values) == 1 else torch.stack(values)
        write_back_(weights, weights[0].nearest(stack))
        return Retraction("columns")

    def _lengths(self, matrices: Tensor) -> Tensor:
        """Return the lengths of the columns; that of a zero vector of padding as the one it should
        have."""
        lengths = torch.linalg.vector_norm(matrices, dim=-2, dtype=torch.float64)
        padding = self.place.padding
        if padding is not None:
            own = lengths[..., padding]
            lengths[..., padding] = own.where(own != 0.0, self.gain)
        return lengths
