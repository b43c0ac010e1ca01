"""Gram matrices and other symmetric products."""

from __future__ import annotations

import torch
from torch import Tensor

# From this size on, half of a symmetric product is computed in row panels and mirrored: a quarter
# less time on a CPU.
_PANELS_FROM = 256
_PANEL = 128


def gram_of(point: Tensor) -> Tensor:
    """Return ``W^T W`` of tall (..., rows, columns), on a CPU half of it mirrored."""
    flat = point[None] if point.dim() == 2 else point.flatten(0, -3)
    gram = point.new_empty(small_shape(flat))
    mirrored_product(flat.mT, flat, out=gram, alpha=1.0)
    return gram.reshape(small_shape(point))


def minus_identity_(square: Tensor) -> Tensor:
    """Subtract I in place."""
    square.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    return square


def mirrored_product(
    left: Tensor, right: Tensor, *, out: Tensor, alpha: float, sign: int = 1
) -> None:
    """Write ``alpha * left @ right``, known to be symmetric, or skew-symmetric with sign -1."""
    size = out.shape[-1]
    if size < _PANELS_FROM or out.device.type != "cpu":
        scaled_product(left, right, out=out, alpha=alpha)
        return
    width = max(_PANEL, size // 8)
    for start in range(0, size, width):
        rows = slice(start, start + width)
        panel = out[..., rows, start:]
        scaled_product(left[..., rows, :], right[..., start:], out=panel, alpha=alpha)
        if start:
            torch.mul(out[..., :start, rows].mT, sign, out=out[..., rows, :start])


def small_shape(weight: Tensor) -> tuple[int, ...]:
    """Return the shape of ``W^T W``."""
    return (*weight.shape[:-2], weight.shape[-1], weight.shape[-1])


def scaled_product(left: Tensor, right: Tensor, *, out: Tensor, alpha: float) -> None:
    """Write ``alpha * left @ right``; the factor costs nothing inside the product."""
    multiply = torch.addmm if left.dim() == 2 else torch.baddbmm
    multiply(out, left, right, beta=0, alpha=alpha, out=out)
