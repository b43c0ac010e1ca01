"""The spectral hammer: the largest singular value is set to a number, and no other is changed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.constrain._options import SetOptions
from wellposed.constrain._set import SETS, ZeroColumns
from wellposed.constrain.sets._spectral_size import SpectralSize
from wellposed.errors import ConvergenceError
from wellposed.linalg import Workspace, certified_spectral_norm, tall, wide


@SETS.register("spectral_hammer")
@dataclass(frozen=True)
class SpectralHammer(SpectralSize):
    """Set the largest singular value to ``size``: ``W + (size - s) u v^T``.

    Empirical: other singular values that pass ``size`` in the same step stay there until they are the
    largest. `error` measures how far. Source: Newhouse et al. 2025 (arXiv 2507.13338), who find u, s,
    v by power iteration; here an eigensolver does. For a proved bound use ``to="spectral"``.
    """

    @classmethod
    def refusal_of_zeros(cls, zeros: ZeroColumns, options: SetOptions) -> str | None:
        """Refuse a zero matrix: it has no singular vectors."""
        del options
        return "zero, so it has no singular vectors" if zeros.count == zeros.columns else None

    def error(self, matrix: Tensor) -> float:
        """Measure ``| |W|_2 / size - 1 |`` with the certified norm."""
        return abs(float(certified_spectral_norm(matrix)) / self.size - 1.0)

    def nearest(self, matrix: Tensor) -> Tensor:
        """Set the largest singular value of each matrix; no other is lowered."""
        return self.nearest_late(matrix, Workspace())

    def nearest_late(self, matrix: Tensor, work: Workspace) -> Tensor:
        """Do as `nearest`; zero matrices are refused at the end of the step."""
        point = tall(wide(matrix))
        gram = point.mT @ point
        total = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
        is_bad = ~(torch.isfinite(total) & (total > 0.0))
        if work.bounds("none", is_bad.sum(), guess=(0.0,))[0] > 0.0:
            raise ConvergenceError(f"a {tuple(matrix.shape[-2:])} matrix is zero or not finite")

        vectors = torch.linalg.eigh(gram.where(torch.isfinite(gram), 0.0)).eigenvectors
        right = vectors[..., -1:]
        image = point @ right
        norms = torch.linalg.vector_norm(image, dim=-2, keepdim=True)
        moved = point + (image * (self.size / norms - 1.0)) @ right.mT
        oriented = moved if matrix.shape[-2] >= matrix.shape[-1] else moved.mT
        return oriented.to(matrix.dtype)
