"""Clip the few largest singular values of a matrix by their vectors, kept from step to step."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.linalg._norms import ritz_start
from wellposed.linalg._rungs import TOP, grams_of, is_within, lost_in_proof, sizes_of
from wellposed.linalg._tensors import Workspace, full_precision, tall

# So many vectors are kept. If more values than `_MOST` are above the bound, a polynomial is faster.
_COUNT = 32
_MOST = 24
# Products with W^T W for each step. Between steps the vectors turn, and two are not always enough.
_ROUNDS = 3
_FIRST_ROUNDS = 12
# Values are set so much below what a proof can show, for those that the vectors miss.
_SLACK = 5e-4
# Smaller matrices are faster in batches, and have too few values for so many vectors.
_SIDE = 128
# Frobenius norms, in bounds, above which a step was so large that the vectors are of another matrix.
_FAR = 8.0
# Bounds outside of these could overflow in float32 products.
_BOUNDS = (1e-6, 1e6)


class Deflation(NamedTuple):
    """Result of `deflate_`."""

    before: float
    """A proved bound on ``|W|_2`` before it; inf if the result was not proved: W is unchanged."""
    vectors: Tensor
    """The vectors for the next step, orthonormal."""
    lengths: list[float]
    """``|W v|`` of each, before, in bounds; falling."""


def can_deflate(weight: Tensor, bound: float) -> bool:
    """Whether `deflate_` takes such a matrix: float32 or float64, neither small nor sharded."""
    is_wide = weight.dtype in (torch.float32, torch.float64)
    return is_wide and min(weight.shape) >= _SIDE and _BOUNDS[0] <= bound <= _BOUNDS[1]


def start_vectors(weight: Tensor) -> Tensor:
    """Return vectors of a finite W for the first call of `deflate_`; deterministic.

    Cost: 24 products of W with 32 vectors.
    """
    matrix = tall(weight.detach())
    vectors = ritz_start(matrix.shape[1] * _COUNT, matrix).view(-1, _COUNT)
    with torch.no_grad(), full_precision(matrix.device.type):
        for _ in range(_FIRST_ROUNDS // _ROUNDS):
            vectors = _ritz_pairs(matrix, vectors)[1]
    return vectors


def deflate_(weight: Tensor, vectors: Tensor, *, bound: float = 1.0) -> Deflation:
    """Clip the singular values of W at ``bound``, in place, by vectors near the singular ones.

    Status: certified for the matrix as stored, as `cap_spectral_norm_`, or unchanged. With
    orthonormal ``v_i`` of lengths ``s_i = |W v_i|`` above t, W becomes ``W - sum (1 - t / s_i) W v_i
    v_i^T``, and a Cholesky factor proves its norm. t is below the bound by what the rounding of a
    proof hides: 0.3 % at 512 columns. If the proof holds, the distance to the nearest matrix of the
    ball is at most ``(sum (s_i - t)^2 - (s_i - bound)_+^2)^(1/2)`` in the Frobenius norm, however
    rough the vectors are.
    Derivation: docs/theory/steps.md. Source: `wellposed`; subspace iteration: Halko, Martinsson and
    Tropp 2011.

    Args:
        weight: (rows, columns) for which `can_deflate` holds, changed in place.
        vectors: of the last call, or of `start_vectors`.
        bound: above 0.

    Cost: 7 products of W with 32 vectors, a Gram matrix and a Cholesky factor: less than half of
    the polynomial's. When not to use: if more than 24 values are above the bound; it gives up.

    >>> weight = torch.diag(torch.linspace(0, 1.02, 256))
    >>> vectors = start_vectors(weight)
    >>> deflate_(weight, vectors).before < 1.2, bool(torch.linalg.matrix_norm(weight, 2) <= 1)
    (True, True)
    """
    matrix = tall(weight.detach())
    with torch.no_grad(), full_precision(matrix.device.type):
        (size,) = sizes_of(matrix[None], Workspace(), bound)[1]
        if not size <= _FAR * math.sqrt(matrix.shape[1]):
            return Deflation(math.inf, vectors, [])
        images, vectors = _ritz_pairs(matrix, vectors)
        lengths = torch.linalg.vector_norm(images, dim=0, dtype=torch.float64) / bound
        numbers = lengths.tolist()
        target = TOP - 0.5 * lost_in_proof(matrix, size) - _SLACK
        count = sum(length > target for length in numbers)
        if count > _MOST:
            return Deflation(math.inf, vectors, numbers)

        part = (1.0 - target / lengths[:count]).to(matrix)
        removed = images[:, :count] * part
        inside = torch.addmm(matrix, removed, vectors[:, :count].mT, alpha=-1.0)
        point = inside if bound == 1.0 else inside / bound
        grams = grams_of(point[None], *sizes_of(point[None], Workspace()))
        if not bool(is_within(grams, [TOP * TOP])):
            return Deflation(math.inf, vectors, numbers)

        if not count:
            return Deflation(TOP * bound, vectors, numbers)
        matrix.copy_(inside)
        moved = math.hypot(*(length - target for length in numbers[:count]))
        # The rounding of the difference, and of vectors that are orthonormal up to it.
        rounding = 1e-5 * (size + _COUNT * moved)
        return Deflation((TOP + moved + rounding) * bound, vectors, numbers)


def _ritz_pairs(matrix: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Improve vectors by a few products with W^T W; return W V and V by falling lengths."""
    for _ in range(_ROUNDS):
        vectors = torch.linalg.qr(matrix.mT @ (matrix @ vectors))[0]
    images = matrix @ vectors
    turn = torch.linalg.eigh((images.mT @ images).double())[1].flip(-1).to(matrix)
    return images @ turn, vectors @ turn
