"""The set of orthogonal matrices: gradients are projected, steps retracted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor

from wellposed.constrain._copies import copy_before
from wellposed.constrain._matrix import ConstrainedMatrix
from wellposed.constrain._options import SetOptions
from wellposed.constrain._set import (
    SETS,
    TOLERANCES,
    MatrixSet,
    NearestMatrices,
    ZeroColumns,
)
from wellposed.constrain._weight_slice import WeightSlice
from wellposed.errors import ConvergenceError
from wellposed.linalg import (
    Retraction,
    Workspace,
    gram_of,
    isometry_error,
    joined,
    polar_factors,
    retract_,
    rotate,
    skew_gradient_,
    tall,
    tangent_gradient_,
    wide,
    write_matrices_,
)


@SETS.register("orthogonal")
@dataclass(frozen=True)
class Orthogonal(MatrixSet):
    """``W^T W = size^2 I``: project the gradient before the step, retract the matrix after it.

    A table of embeddings is only retracted. A projected gradient is not zero for tokens outside the
    batch, and Adam would make it as long a step as any.
    """

    keeps_master = True
    is_oriented = False
    options = frozenset({"gain", "embeddings"})

    @classmethod
    def refusal(
        cls, weight_slice: WeightSlice, options: SetOptions, *, is_table: bool
    ) -> str | None:
        """Refuse tables of more vectors than dimensions, unless ``embeddings`` chose their columns."""
        if options.embeddings == "fit" or not is_table or weight_slice.parameter is None:
            return None
        count, dimensions = weight_slice.parameter.shape
        if count <= dimensions:
            return None
        return (
            f"an embedding of {count} vectors in {dimensions} dimensions, and at most {dimensions}"
            " can be orthonormal; give embeddings='fit' to keep its columns orthogonal, or use"
            " wellposed.OrthogonalityPenalty(model, embedding=...) to pull its vectors towards"
            " orthogonality"
        )

    @classmethod
    def refusal_of_zeros(cls, zeros: ZeroColumns, options: SetOptions) -> str | None:
        """Refuse to fit the size to a zero matrix."""
        if _gain(options) == "fit" and zeros.count == zeros.columns:
            return "zero, as an adapter's last factor starts"
        return None

    @classmethod
    def chosen(cls, weight_slice: WeightSlice, options: SetOptions, *, is_table: bool) -> Self:
        """Return the set of size ``gain``; NaN is a size that is fitted at the start."""
        is_frame = is_table and options.embeddings == "fit"
        gain = _gain(options)
        size = math.nan if is_frame or gain == "fit" else gain
        return replace(cls.for_weight(size, weight_slice), is_steered=not is_frame)

    @classmethod
    def for_weight(cls, size: float, weight_slice: WeightSlice) -> Self:
        """Return a set with steered steps."""
        return replace(super().for_weight(size, weight_slice), is_steered=True)

    def error(self, matrix: Tensor) -> float:
        """Measure ``max |W^T W / size^2 - I|``, in float64."""
        return float(isometry_error(matrix, gain=self.size))

    def spectral_error(self, matrix: Tensor) -> float:
        """Measure the largest ``|sigma / size - 1|``, in float64."""
        return float(isometry_error(matrix, gain=self.size, norm="spectral"))

    def nearest(self, matrix: Tensor) -> Tensor:
        """Scale the polar factor; a zero padding vector of an embedding stays zero."""
        return self.nearest_stack(matrix[None]).matrices[0]

    def nearest_stack(self, stack: Tensor) -> NearestMatrices:
        """Take the polar factors in one product; a size of NaN becomes the mean singular value."""
        point = tall(wide(stack.clone()))
        gram = gram_of(point)
        factors = None
        sizes = [self.size] * len(stack)
        if math.isnan(self.size):
            factors = polar_factors(tall(stack), gram)
            traces = (factors * point).sum(dim=(-2, -1)) / point.shape[-1]
            # Three digits, so that a fitted matrix is not moved again.
            sizes = [float(f"{mean:.3g}") for mean in traces.tolist()]
            if 0.0 in sizes:
                raise ConvergenceError("the matrix is zero, so gain='fit' has nothing to fit")

        gains = gram.new_tensor(sizes)[:, None, None]
        away = gram / gains.square()
        away.diagonal(dim1=-2, dim2=-1).sub_(1.0)
        before = away.abs_().amax((-2, -1)).tolist()
        outside = [index for index, error in enumerate(before) if not error <= self.tolerance]
        if outside:
            some = outside if len(outside) < len(stack) else slice(None)  # views of all
            fitted = None if factors is None else factors[some]
            nearest = polar_factors(tall(stack[some]), gram[some]) if fitted is None else fitted
            point[some] = nearest.mul_(gains[some])

        inside = point if stack.shape[-2] >= stack.shape[-1] else point.mT
        if not self.is_steered and stack.shape[-2] > stack.shape[-1]:
            inside.mul_(stack.ne(0).any(dim=-1, keepdim=True))
        after = isometry_error(inside.to(stack.dtype), gain=gains)
        return NearestMatrices(sizes, before, inside, after.tolist())

    def state(self, matrices: Sequence[ConstrainedMatrix], work: Workspace) -> None:
        """Put gradients into tangent spaces, and those of square matrices into Lie coordinates."""
        if not self.is_steered:
            return
        first = matrices[0]
        gradients = [matrix.gradient for matrix in matrices if matrix.gradient is not None]
        points = [matrix.value if matrix.master is None else matrix.master for matrix in matrices]
        point = joined(points, first.dtype, "points", work)
        self._notice_edits(matrices, point, work)
        gradient = joined(gradients, first.dtype, "gradients", work)
        project = skew_gradient_ if first.is_square else tangent_gradient_
        project(point, gradient, gain=self.size, workspace=work)
        write_matrices_(gradients, gradient)

    def _notice_edits(
        self, matrices: Sequence[ConstrainedMatrix], point: Tensor, work: Workspace
    ) -> None:
        """Compare with the last step's result: version counters miss edits through ``.data``."""
        unchanged = [matrix for matrix in matrices if matrix.is_kept]
        is_same = len(unchanged) == len(matrices)
        if is_same:
            before = [matrix.before for matrix in unchanged if matrix.before is not None]
            # On a CPU `dist` needs half the time of `equal`.
            change = torch.dist(point, joined(before, matrices[0].dtype, "before", work))
            is_same = work.bounds("edited", change, guess=(0.0,))[0] == 0.0

        if not is_same:
            for matrix in unchanged:
                matrix.is_kept = False
                matrix.drift = math.inf
        elif work.is_ahead:
            copy_before(matrices)  # the guess may be wrong

    def retract(self, matrices: Sequence[ConstrainedMatrix], work: Workspace) -> Retraction:
        """Replace the optimizer's steps by steps along the manifold."""
        first = matrices[0]
        values = [matrix.value for matrix in matrices]
        moved = joined(values, first.dtype, "gradients", work, fresh=work.is_ahead)
        points = [matrix.point for matrix in matrices if matrix.point is not None]
        point = None
        if len(points) == len(matrices) and (
            first.is_square or first.is_half or first.is_displaced
        ):
            point = joined(points, first.dtype, "points", work)

        options = {"gain": self.size, "tolerance": TOLERANCES[first.dtype], "workspace": work}
        step = moved
        if point is not None and not first.is_displaced:
            # Padding makes reads by columns faster.
            step = work("step", moved.shape, moved, padded=True) if first.is_square else moved
            torch.sub(moved, point.to(first.stored_dtype), out=step)

        if first.is_square and point is not None:
            drift = max(matrix.drift for matrix in matrices)
            try:
                taken = rotate(point, step, out=moved, drift=drift, **options)
            except ConvergenceError:
                if len(matrices) == 1 and not work.is_ahead:
                    first.store(values, moved)  # the point; several are retried one by one
                raise
        else:
            taken = retract_(moved if point is None else moved.add_(point), **options)
        work.write(lambda: first.store(values, moved))

        return taken


def _gain(options: SetOptions) -> float | Literal["fit"]:
    """Return the gain; by default it is fitted to trained weights, and else 1."""
    if options.gain is None:
        return "fit" if options.is_pretrained else 1.0
    return options.gain
