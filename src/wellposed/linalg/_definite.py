"""Proofs that a symmetric matrix in blocks is positive definite, rounding included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from wellposed.linalg._norms import power_of_two

Blocks = Mapping[tuple[int, int], Tensor]
"""Blocks (..., n_i, n_j) of a symmetric matrix by row and column, on and below the diagonal."""
UNIT = torch.finfo(torch.float64).eps / 2
# Entries below the diagonal may be off by so many roundings; sums in the factor likewise.
_ROUNDINGS = 4
_MORE_TERMS = 16


def block_factor(blocks: Blocks) -> tuple[dict[tuple[int, int], Tensor], Tensor]:
    """Return the Cholesky factor of a matrix in blocks, and which of the batch have one.

    Absent blocks are zero, and stay absent unless the factor fills them. Differentiable.
    """
    count = 1 + max(row for row, _ in blocks)
    factor: dict[tuple[int, int], Tensor] = {}
    exists: Tensor | None = None
    for column in range(count):
        corner, info = torch.linalg.cholesky_ex(_remainder(blocks, factor, column, column))
        diagonal = corner.detach().diagonal(dim1=-2, dim2=-1)
        is_right = (info == 0) & torch.isfinite(corner.detach().sum((-2, -1)))
        is_right = is_right & (diagonal > 0).all(-1)
        exists = is_right if exists is None else exists & is_right
        factor[column, column] = corner
        for row in range(column + 1, count):
            below = _remainder(blocks, factor, row, column)
            if below is not None:
                factor[row, column] = torch.linalg.solve_triangular(
                    corner.mT, below, upper=True, left=False
                )
    assert exists is not None
    return factor, exists


def _remainder(blocks: Blocks, factor: Blocks, row: int, column: int) -> Tensor | None:  # type: ignore[return]
    """Return a block less the products of the factor's earlier columns; None if it is zero."""
    rest = blocks.get((row, column))
    for earlier in range(column):
        left = factor.get((row, earlier))
        right = factor.get((column, earlier))
        if left is not None and right is not None:
            product = left @ right.mT
            rest = -product if rest is None else rest - product
    return rest


def _terms(blocks: Blocks, sizes: Sequence[int]) -> int:
    """Return the largest number of products in an entry of the factor: absent blocks have none."""
    filled = set(blocks)
    for column in range(len(sizes)):
        below = [row for row in range(column + 1, len(sizes)) if (row, column) in filled]
        # A column is subtracted from every pair of rows that it reaches.
        filled.update((row, other) for row in below for other in below if row >= other)
    rows = range(len(sizes))
    return max(sum(sizes[column] for column in rows if (row, column) in filled) for row in rows)


@torch.no_grad()
def proves_definite(blocks: Blocks, errors: Sequence[Tensor]) -> Tensor:
    """Return for each matrix of a batch whether it is proved positive definite.

    Status: certified. True proves it for every symmetric matrix whose entry (j, k) of a diagonal
    block i differs from the stored one by at most ``e_j e_k``, e being ``errors[i]``, and whose
    other entries differ by 4 roundings at most. False proves nothing. Source: Rump (2006),
    Verification of positive definiteness: a Cholesky factor of the matrix, scaled to a diagonal of
    at most 1 and less the rounding of the factor, exists. Theory note B18.

    Args:
        blocks: Float64 blocks (..., n_i, n_j) by (row, column), row >= column; absent ones are 0.
        errors: For each i, (..., n_i): the bound of rounding of the diagonal block i.

    Cost: one Cholesky factor.

    >>> matrix = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    >>> error = torch.zeros(2, dtype=torch.float64)
    >>> bool(proves_definite({(0, 0): matrix}, [error]))
    True
    >>> bool(proves_definite({(0, 0): matrix - torch.eye(2)}, [error]))
    False
    """
    diagonals = [blocks[i, i].diagonal(dim1=-2, dim2=-1) for i in range(len(errors))]
    # Powers of two scale without rounding.
    scales = [power_of_two(diagonal.clamp_min(0).rsqrt()) for diagonal in diagonals]
    scaled = {
        (row, column): block * scales[row][..., :, None] * scales[column][..., None, :]
        for (row, column), block in blocks.items()
    }
    terms = _terms(blocks, [diagonal.shape[-1] for diagonal in diagonals])
    slack = torch.zeros(diagonals[0].shape[:-1], dtype=torch.float64, device=diagonals[0].device)
    for index, (error, scale) in enumerate(zip(errors, scales, strict=True)):
        trace = scaled[index, index].diagonal(dim1=-2, dim2=-1).sum(-1)
        slack = slack + 2 * (terms + _MORE_TERMS) * UNIT * trace + (error * scale).square().sum(-1)

    for (row, column), block in scaled.items():
        if row > column:
            slack = slack + _ROUNDINGS * UNIT * block.square().sum((-2, -1)).sqrt()

    # The margin covers the rounding of the slack, and of subtracting it.
    slack = 1.01 * slack + _ROUNDINGS * UNIT
    lowered = dict(scaled)
    for index in range(len(errors)):
        lowered[index, index] = scaled[index, index].clone()
        lowered[index, index].diagonal(dim1=-2, dim2=-1).sub_(slack[..., None])
    return block_factor(lowered)[1]
