"""Three sets of matrices: orthogonal, below a spectral norm, and with columns of one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from wellposed.constrain._matrix import (
    SETS,
    TOLERANCES,
    ConstrainedMatrix,
    MatrixSet,
    joined,
    write_matrices_,
)
from wellposed.constrain._select import Candidate
from wellposed.errors import ConvergenceError
from wellposed.linalg import (
    Retraction,
    Workspace,
    cap_spectral_norms_,
    certified_spectral_norm,
    is_sharded,
    isometry_error,
    nearest_orthogonal,
    read,
    retract_,
    rotate,
    skew_gradient_,
    tangent_gradient_,
    write_,
)


@dataclass(frozen=True)
class Orthogonal(MatrixSet):
    """``W^T W = size^2 I``: the gradient is projected before the step, the matrix retracted after it.

    A table of embeddings is not steered, and the retraction alone takes out the normal part: a
    projected gradient is not zero for a token outside the batch, and Adam would make it as long a
    step as any.
    """

    keeps_master = True

    @classmethod
    def of(cls, size: float, place: Candidate) -> Self:
        """A chosen size is that of a steered matrix; see `fitted`."""
        return replace(super().of(size, place), is_steered=True)

    def error(self, matrix: Tensor) -> float:
        """Measure ``max |W^T W / size^2 - I|``, in float64."""
        return float(isometry_error(matrix, gain=self.size))

    def nearest(self, matrix: Tensor) -> Tensor:
        """Scale the polar factor; a zero vector of padding of an embedding stays zero."""
        wide = matrix.to(torch.float32 if matrix.device.type == "mps" else torch.float64)
        inside = nearest_orthogonal(wide, gain=self.size).weight
        if not self.is_steered and matrix.shape[0] > matrix.shape[1]:
            inside = inside.where(matrix.ne(0).any(dim=1, keepdim=True), 0.0)
        return inside

    def state(self, matrices: Sequence[ConstrainedMatrix], work: Workspace) -> None:
        """Put the gradients into the tangent spaces, those of square matrices into Lie coordinates."""
        if not self.is_steered:
            return
        first = matrices[0]
        gradients = [each.gradient for each in matrices if each.gradient is not None]
        points = [each.value if each.master is None else each.master for each in matrices]
        point = joined(points, first.dtype, "points", work)
        whole = joined(gradients, first.dtype, "gradients", work)
        project = skew_gradient_ if first.is_square else tangent_gradient_
        project(point, whole, gain=self.size, workspace=work)
        write_matrices_(gradients, whole)

    def retract(self, matrices: Sequence[ConstrainedMatrix], work: Workspace) -> Retraction:
        """Turn the steps the optimizer took into steps along the manifold."""
        first, values = matrices[0], [each.value for each in matrices]
        moved = joined(values, first.dtype, "gradients", work)
        points = [each.point for each in matrices if each.point is not None]
        point = None
        if len(points) == len(matrices) and (
            first.is_square or first.is_half or first.is_displaced
        ):
            point = joined(points, first.dtype, "points", work)
        options = {"gain": self.size, "tolerance": TOLERANCES[first.dtype], "workspace": work}
        step = moved
        if point is not None and not first.is_displaced:
            # The step is read by columns too, which padding makes faster.
            step = work("step", moved.shape, moved, padded=True) if first.is_square else moved
            torch.sub(moved, point.to(first.stored_dtype), out=step)
        if first.is_square and point is not None:
            drift = max(each.drift for each in matrices)
            try:
                taken = rotate(point, step, out=moved, drift=drift, **options)
            except ConvergenceError:
                if len(matrices) == 1:  # it has the point; of several each is tried alone
                    first.store(values, moved)
                raise
        else:
            taken = retract_(moved if point is None else moved.add_(point), **options)
        first.store(values, moved)
        return taken


def fitted(matrix: Tensor, tolerance: float, *, is_steered: bool) -> Orthogonal:
    """Return the orthogonal set of the mean singular value, to three digits so that a matrix fitted
    before is not moved again."""
    size = float(f"{nearest_orthogonal(matrix, gain='fit').gain:.3g}")
    return Orthogonal(size, tolerance, is_steered)


@dataclass(frozen=True)
class Spectral(MatrixSet):
    """``|W|_2 <= size``, proved after each step."""

    decays = True
    stacked = 2**16

    @classmethod
    def of(cls, size: float, place: Candidate) -> Self:
        """What is proved needs no tolerance."""
        del place
        return cls(size)

    def error(self, matrix: Tensor) -> float:
        """Measure ``max(0, |W|_2 / size - 1)`` with the certified norm."""
        return max(0.0, float(certified_spectral_norm(matrix)) / self.size - 1.0)

    def nearest(self, matrix: Tensor) -> Tensor:
        """Cap the singular values."""
        inside = matrix.clone()
        cap_spectral_norms_([inside], bound=self.size, nearest=True)
        return inside

    def retract(self, matrices: Sequence[ConstrainedMatrix], work: Workspace) -> Retraction:
        """Cap the singular values of all; the largest is reported."""
        del work
        values = [each.value for each in matrices]
        whole = [read(value) for value in values]
        proved = [each.proved for each in matrices]
        capped = cap_spectral_norms_(whole, bound=self.size, before=proved)
        for each, cap in zip(matrices, capped, strict=True):
            each.proved = cap.before
        if is_sharded(values[0]):
            write_(values[0], whole[0])
        return Retraction(*max(capped, key=lambda cap: cap.before))


@dataclass(frozen=True)
class Columns(MatrixSet):
    """Columns of length ``size``: the images of the basis vectors, and of an embedding the vectors
    of its tokens."""

    padding: int | None = None
    """The column that is a vector of padding, which may be zero."""

    @classmethod
    def of(cls, size: float, place: Candidate) -> Self:
        """Tolerate the rounding of the entries, and of the sum of squares that measures them."""
        assert place.parameter is not None
        value = place.seen(place.parameter.detach())
        double = torch.finfo(torch.float64).eps
        units = 2.0 * torch.finfo(value.dtype).eps + value.shape[0] * double
        return cls(size, units, padding=place.padding)

    def error(self, matrix: Tensor) -> float:
        """Measure ``max_j | |W e_j| / size - 1 |``; a vector of padding may be zero."""
        return float((self._lengths(matrix) / self.size - 1.0).abs().max())

    def nearest(self, matrix: Tensor) -> Tensor:
        """Divide each column by its length; of a stack, those of each matrix."""
        lengths = self._lengths(matrix)
        has_none = ~(torch.isfinite(lengths) & (lengths > 0.0))
        if bool(has_none.any()):
            columns = torch.nonzero(has_none)[..., -1].tolist()
            count = f"{len(columns)} of {lengths.numel()} columns are zero or not finite"
            raise ConvergenceError(f"{count} and have no direction: {columns[:5]}")
        return (matrix.double() * (self.size / lengths).unsqueeze(-2)).to(matrix.dtype)

    def _lengths(self, matrices: Tensor) -> Tensor:
        """Return the lengths of the columns; that of a zero vector of padding as the one it should
        have."""
        lengths = torch.linalg.vector_norm(matrices, dim=-2, dtype=torch.float64)
        if self.padding is not None:
            length = lengths[..., self.padding]
            lengths[..., self.padding] = length.where(length != 0.0, self.size)
        return lengths


for _name, _kind in {"orthogonal": Orthogonal, "spectral": Spectral, "columns": Columns}.items():
    SETS.register(_name)(_kind)
