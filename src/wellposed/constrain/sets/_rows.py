"""The set of matrices whose rows have one length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from wellposed.constrain._set import SETS, MatrixSet
from wellposed.constrain._weight_slice import WeightSlice
from wellposed.errors import ConvergenceError
from wellposed.linalg import Workspace


@SETS.register("rows")
@dataclass(frozen=True)
class Rows(MatrixSet):
    """Rows of W (out, in) of length ``size``: ``|W^T e_i| = size``; of an embedding, its features.

    Up to rounding; nothing is claimed of ``|W|_2``. Source: nGPT (Loshchilov et al. 2025), which keeps
    weights on the sphere along the dimension of the tokens: rows of those that read tokens, columns
    of those that write them.
    """

    @classmethod
    def for_weight(cls, size: float, weight_slice: WeightSlice) -> Self:
        """Tolerate the rounding of entries, and of the sum of squares that measures them."""
        assert weight_slice.parameter is not None
        double = torch.finfo(torch.float64).eps
        units = 2.0 * torch.finfo(weight_slice.parameter.dtype).eps
        return cls(size, units + weight_slice.shape[1] * double)

    def error(self, matrix: Tensor) -> float:
        """Measure ``max_i | |W^T e_i| / size - 1 |``."""
        return float((_lengths(matrix) / self.size - 1.0).abs().max())

    def nearest(self, matrix: Tensor) -> Tensor:
        """Divide each row of each matrix by its length."""
        return self.nearest_late(matrix, Workspace())

    def nearest_late(self, matrix: Tensor, work: Workspace) -> Tensor:
        """Do as `nearest`; zero rows are refused at the end of the step."""
        lengths = _lengths(matrix)
        has_none = ~(torch.isfinite(lengths) & (lengths > 0.0))
        if work.bounds("none", has_none.sum(), guess=(0.0,))[0] > 0.0:
            rows = torch.nonzero(has_none)[..., -1].tolist()
            count = f"{len(rows)} of {lengths.numel()} rows are zero or not finite"
            raise ConvergenceError(f"{count} and have no direction: {rows[:5]}")
        return (matrix.double() * (self.size / lengths).unsqueeze(-1)).to(matrix.dtype)


def _lengths(matrices: Tensor) -> Tensor:
    return torch.linalg.vector_norm(matrices, dim=-1, dtype=torch.float64)
