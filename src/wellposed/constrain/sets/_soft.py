"""The soft spectral cap: an odd polynomial that bends all singular values below a bound."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from wellposed.constrain._set import SETS
from wellposed.constrain.sets._spectral_size import (
    SpectralSize,
    excess,
    largest_singular_values,
)
from wellposed.linalg import Workspace, full_precision, tall, wide

# Norms, in units of the bound, that one polynomial can bend; larger ones are divided first.
_MOST = 1.3
_KNOTS = 256
# Room for the rounding of the stored result and of the products, in units of the bound.
_ROOM = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def bent(x: float, strength: float) -> float:
    """Return ``p2(p1(x))`` with ``p1(x) = x - a x^3`` and ``p2(x) = x + a x^3``."""
    once = x - strength * x**3
    return once + strength * once**3


@cache
def strengths() -> tuple[float, ...]:
    """Return the smallest strength that bends [0, b] below 1, for b = 1 to `_MOST` in `_KNOTS` steps.

    `bent` rises up to ``(3 a)^(-1/2)``, which is `_MOST` for the largest strength. So its largest value
    is that at b. It falls with the strength.
    """
    chosen: list[float] = []
    for knot in range(_KNOTS + 1):
        most = 1.0 + (_MOST - 1.0) * knot / _KNOTS
        low = 0.0
        high = 1.0 / (3.0 * _MOST**2)
        for _ in range(50):
            middle = (low + high) / 2
            if bent(most, middle) > 1.0:
                low = middle
            else:
                high = middle
        chosen.append(high)
    return tuple(chosen)


@SETS.register("spectral_soft")
@dataclass(frozen=True)
class SpectralSoft(SpectralSize):
    """``|W|_2 <= size``: if a step leaves the set, every singular value is bent, the larger the more.

    Certified as stored up to the tolerance: the polynomial is chosen for the norm that an eigensolver
    measures. Newhouse et al. (2025, arXiv 2507.13338) choose it from the rate and Muon's step size,
    and apply it to each step. It is no nearest matrix: ``to="spectral"`` moves a weight less.
    """

    decays = True

    def error(self, matrix: Tensor) -> float:
        """Measure ``max(0, |W|_2 / size - 1)`` with the certified norm."""
        return excess(matrix, self.size)

    def nearest(self, matrix: Tensor) -> Tensor:
        """Bend the singular values of each matrix that is outside."""
        return self.nearest_late(matrix, Workspace())

    def nearest_late(self, matrix: Tensor, work: Workspace) -> Tensor:
        """Do as `nearest`; matrices that are not finite are refused at the end of the step."""
        norms = largest_singular_values(matrix, work, zeros=True) / self.size
        room = 1.0 - _ROOM[matrix.dtype]
        # Far outside, the matrix is divided into the range of the polynomials first.
        scale = (_MOST / norms.clamp_min(_MOST)) / self.size
        point = tall(wide(matrix)) * scale[..., None, None]
        table = point.new_tensor(strengths())
        knot = (norms.clamp(1.0, _MOST) - 1.0) * (_KNOTS / (_MOST - 1.0))
        # The next knot: a larger strength bends more.
        strength = table[knot.ceil().long().clamp_max(_KNOTS)][..., None, None]
        with full_precision(point.device.type):
            once = point - strength * (point @ (point.mT @ point))
            twice = once + strength * (once @ (once.mT @ once))

        inside = (norms <= 1.0)[..., None, None]
        result = (twice * (self.size * room)).where(~inside, tall(wide(matrix)))
        oriented = result if matrix.shape[-2] >= matrix.shape[-1] else result.mT
        return oriented.to(matrix.dtype)
