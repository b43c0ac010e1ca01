"""The size of sets of one spectral norm: a number, or one in units of root mean squares."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.constrain._options import SetOptions
from wellposed.constrain._select import LAYERS
from wellposed.constrain._set import MatrixSet
from wellposed.constrain._weight_slice import WeightSlice
from wellposed.errors import ConvergenceError
from wellposed.linalg import Workspace, certified_spectral_norm, tall, wide
from wellposed.options import rms_radius


@dataclass(frozen=True)
class SpectralSize(MatrixSet):
    """A set whose ``bound`` is a spectral norm, or ``"rms:X"``, X sqrt(fan_out / fan_in)."""

    default_where = LAYERS

    @classmethod
    def check_bound(cls, bound: float | str | None) -> None:
        """Allow also ``"rms:X"``."""
        is_rms = isinstance(bound, str) and rms_radius(bound) is not None
        super().check_bound(None if is_rms else bound)

    @classmethod
    def reads_orientation(cls, options: SetOptions) -> bool:
        """A norm by root mean squares depends on which side is the output."""
        return isinstance(options.bound, str)

    @classmethod
    def chosen(cls, weight_slice: WeightSlice, options: SetOptions, *, is_table: bool) -> MatrixSet:
        """Scale a bound ``"rms:X"`` with the shape of the weight."""
        if not isinstance(options.bound, str):
            return super().chosen(weight_slice, options, is_table=is_table)
        radius = rms_radius(options.bound)
        assert radius is not None  # `check_bound` raised for it
        rows, columns = weight_slice.shape
        return cls.for_weight(radius * math.sqrt(rows / columns), weight_slice)

    def spectral_error(self, matrix: Tensor) -> float:
        """Return `error`, which is by singular values."""
        return self.error(matrix)


def excess(matrix: Tensor, size: float) -> float:
    """Return ``max(0, |W|_2 / size - 1)`` with the certified norm."""
    return max(0.0, float(certified_spectral_norm(matrix)) / size - 1.0)


def largest_singular_values(matrices: Tensor, work: Workspace, *, zeros: bool) -> Tensor:
    """Return the spectral norms in float64, by an eigensolver on the small Gram matrices.

    Raises:
        ConvergenceError: a matrix is not finite, or, unless ``zeros`` are allowed, zero; at the end of
            the step if reads wait for it.
    """
    point = tall(wide(matrices))
    gram = point.mT @ point
    total = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    is_bad = ~torch.isfinite(total)
    if not zeros:
        is_bad = is_bad | (total == 0.0)
    if work.bounds("none", is_bad.sum(), guess=(0.0,))[0] > 0.0:
        what = "is not finite" if zeros else "is zero or not finite, and has no direction"
        raise ConvergenceError(f"a {tuple(matrices.shape[-2:])} matrix {what}")
    finite = gram.where(torch.isfinite(gram), 0.0)
    return torch.linalg.eigvalsh(finite)[..., -1].clamp_min(0.0).sqrt()
