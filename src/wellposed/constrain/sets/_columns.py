"""The set of matrices whose columns have one length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from wellposed.constrain._options import SetOptions
from wellposed.constrain._set import SETS, MatrixSet, ZeroColumns
from wellposed.constrain._weight_slice import WeightSlice
from wellposed.errors import ConvergenceError
from wellposed.linalg import Workspace


@SETS.register("columns")
@dataclass(frozen=True)
class Columns(MatrixSet):
    """Columns of length ``size``; of an embedding, the vectors of its tokens."""

    padding: int | None = None
    """The column of a padding vector, which may be zero."""

    @classmethod
    def refusal_of_zeros(cls, zeros: ZeroColumns, options: SetOptions) -> str | None:
        """Refuse zero columns: they have no direction."""
        del options
        if zeros.count:
            return f"{zeros.count} zero columns, the first at {zeros.first}"
        return None

    @classmethod
    def for_weight(cls, size: float, weight_slice: WeightSlice) -> Self:
        """Tolerate the rounding of entries, and of the sum of squares that measures them."""
        assert weight_slice.parameter is not None
        double = torch.finfo(torch.float64).eps
        units = 2.0 * torch.finfo(weight_slice.parameter.dtype).eps
        return cls(size, units + weight_slice.shape[0] * double, padding=weight_slice.padding)

    def error(self, matrix: Tensor) -> float:
        """Measure ``max_j | |W e_j| / size - 1 |``; a padding vector may be zero."""
        return float((self._lengths(matrix) / self.size - 1.0).abs().max())

    def nearest(self, matrix: Tensor) -> Tensor:
        """Divide each column of each matrix by its length."""
        return self.nearest_late(matrix, Workspace())

    def nearest_late(self, matrix: Tensor, work: Workspace) -> Tensor:
        """Do as `nearest`; zero columns are refused at the end of the step."""
        lengths = self._lengths(matrix)
        has_none = ~(torch.isfinite(lengths) & (lengths > 0.0))
        if work.bounds("none", has_none.sum(), guess=(0.0,))[0] > 0.0:
            columns = torch.nonzero(has_none)[..., -1].tolist()
            count = f"{len(columns)} of {lengths.numel()} columns are zero or not finite"
            raise ConvergenceError(f"{count} and have no direction: {columns[:5]}")
        return (matrix.double() * (self.size / lengths).unsqueeze(-2)).to(matrix.dtype)

    def _lengths(self, matrices: Tensor) -> Tensor:
        """Return the column lengths; a zero padding vector counts as ``size``."""
        lengths = torch.linalg.vector_norm(matrices, dim=-2, dtype=torch.float64)
        if self.padding is not None:
            length = lengths[..., self.padding]
            lengths[..., self.padding] = length.where(length != 0.0, self.size)
        return lengths
