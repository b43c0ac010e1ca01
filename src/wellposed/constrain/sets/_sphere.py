"""The spectral sphere: matrices whose largest singular value is a number."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from wellposed.constrain._options import SetOptions
from wellposed.constrain._set import SETS, ZeroColumns
from wellposed.constrain.sets._spectral_size import SpectralSize, largest_singular_values
from wellposed.linalg import Workspace, certified_spectral_norm


@SETS.register("spectral_sphere")
@dataclass(frozen=True)
class SpectralSphere(SpectralSize):
    """``|W|_2 = size``: all singular values are divided so that the largest is ``size``.

    To tolerance, by an eigensolver and not by power iteration. The direction of W is kept, so small
    singular values grow with the largest. Source: 2601.08393, where a power iteration measures it.
    """

    @classmethod
    def refusal_of_zeros(cls, zeros: ZeroColumns, options: SetOptions) -> str | None:
        """Refuse a zero matrix: it has no direction."""
        del options
        return (
            "zero, so no multiple of it is on the sphere" if zeros.count == zeros.columns else None
        )

    def error(self, matrix: Tensor) -> float:
        """Measure ``| |W|_2 / size - 1 |`` with the certified norm, 1e-6 above the true one."""
        return abs(float(certified_spectral_norm(matrix)) / self.size - 1.0)

    def nearest(self, matrix: Tensor) -> Tensor:
        """Divide each matrix by its norm."""
        return self.nearest_late(matrix, Workspace())

    def nearest_late(self, matrix: Tensor, work: Workspace) -> Tensor:
        """Do as `nearest`; matrices without a norm are refused at the end of the step."""
        norms = largest_singular_values(matrix, work, zeros=False)
        scaled = matrix.to(norms.dtype) * (self.size / norms)[..., None, None]
        return scaled.to(matrix.dtype)
