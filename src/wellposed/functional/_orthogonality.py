"""How far the rows of a weight are from orthogonal, as numbers without gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.functional._penalties import check_weights
from wellposed.linalg import gathered

_BLOCK = 4096  # rows of a Gram matrix in memory at a time


class OrthogonalityErrors(NamedTuple):
    """Two distances of ``W W^T`` to a multiple of the identity, both scalars."""

    raw: Tensor
    """``max |(W W^T)_ij|`` over i != j, which grows with the square of the scale of W."""
    scale_free: Tensor
    """``min_s |W W^T / s - I|_F / sqrt(m)``, between 0 and 1, the same for all multiples of W."""


@torch.no_grad()
def orthogonality_error(weight: Tensor) -> Tensor:
    """Return ``max |(W W^T)_ij|`` over i != j: zero if and only if the rows are orthogonal.

    Status: exact to rounding, in at least float32; no gradient. Source: McGrath (2024, eq. 3), with
    "equivalent to the identity" read as "equal to zero", as it removes the diagonal.

    Args:
        weight: shape (m, n), floating point; a single row gives 0.

    Raises:
        ShapeError: not a matrix. ConfigError: quantised weight, or float16 on a CPU.

    Cost: 2 m^2 n FLOPs, in blocks of 4096 rows. When not to use: across scales of W;
    `orthogonality_errors` has a number free of scale.

    >>> orthogonality_error(torch.tensor([[3.0, 0.0], [1.0, 2.0]])).item()
    3.0
    """
    return orthogonality_errors(weight).raw


@torch.no_grad()
def orthogonality_errors(weight: Tensor) -> OrthogonalityErrors:
    """Return ``max |G_ij|`` over i != j, and ``min_s |G / s - I|_F / sqrt(m)``, for G = W W^T of m
    rows.

    Status: exact to rounding, in at least float32; no gradient. The second is the sine of the angle
    between G and I, ``sqrt(1 - (tr G)^2 / (m |G|_F^2))``: 0 if and only if the rows are orthogonal
    and of one length, sqrt(1 - 1/m) if all are parallel. For independent normal entries and n
    columns it is about ``sqrt(m / (m + n))``: 0.71 for a square W. It is NaN for a zero weight.

    Args:
        weight: shape (m, n), floating point; a single row gives 0 and 0.

    Raises:
        ShapeError: not a matrix. ConfigError: quantised weight, or float16 on a CPU.

    Cost: 2 m^2 n FLOPs, in blocks of 4096 rows. When not to use: m > n, where G has rank n and
    cannot be near the identity; give the transpose.

    >>> [error.item() for error in orthogonality_errors(3 * torch.eye(2))]
    [0.0, 0.0]
    """
    check_weights([weight])
    weight = gathered(weight)
    matrix = weight.to(torch.promote_types(weight.dtype, torch.float32))
    power = torch.frexp(torch.linalg.vector_norm(matrix, torch.inf)).exponent
    matrix = torch.ldexp(matrix, -power)  # exact, and fourth powers neither overflow nor vanish
    worst = []
    off_diagonal = torch.zeros((), dtype=torch.float64)
    lengths = []
    for start in range(0, matrix.shape[0], _BLOCK):
        with torch.autocast(matrix.device.type, enabled=False):
            gram = matrix[start : start + _BLOCK] @ matrix.t()
        diagonal = gram.diagonal(offset=start)
        lengths.append(diagonal.cpu().to(torch.float64, copy=True))
        diagonal.zero_()
        worst.append(torch.stack(gram.aminmax()).abs().amax())
        off_diagonal += torch.linalg.vector_norm(gram).cpu().double().square()

    squares = torch.cat(lengths)
    inverse = squares.sum() / (squares.square().sum() + off_diagonal)
    distance = (squares * inverse - 1).square().sum() + off_diagonal * inverse.square()
    raw = torch.ldexp(torch.stack(worst).amax(), 2 * power)
    return OrthogonalityErrors(raw, (distance / len(squares)).sqrt())
