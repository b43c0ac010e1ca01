"""The condition of all weights of a model by products of stacks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wellposed.linalg import full_precision, read
from wellposed.measurement._stacks import ENTRIES, in_stacks, norms, stacked
from wellposed.roles import RoleWeight

COLD, WARM = 32, 12
"""Steps of Lanczos from a vector that is as good as random, and from that of the last time."""
INDEPENDENT = 1e-2
"""The least eigenvalue of products of unit vectors that counts: below it they are one by rounding."""
NEW = 0.1
"""How much of the first is added to the second, so that a new largest value shows."""


class _Stack(NamedTuple):
    """Weights of one Gram size: their places among all, the vectors of the last two numbers, and what
    is transferred.

    That is of each: the Frobenius norm; of the Gram matrix G of the weight over it the mean c of the
    diagonal, the Frobenius norm of ``G - c I`` and the largest and smallest entry off the diagonal;
    the products of the vectors with each other, and with ``G - c I`` between them.
    """

    places: tuple[int, ...]
    vectors: Tensor
    numbers: tuple[Tensor, ...]


class StackedCondition:
    """Orthogonality errors, exact to float32 rounding, and largest singular value and stable rank,
    empirical to 1 %, of many weights.

    Method: Lanczos on ``G - c I``, a fixed number of steps for all weights of one Gram size at
    once. Without c near-orthogonal weights would lose their digits.
    """

    def __init__(self, weights: Sequence[RoleWeight]) -> None:
        self._views = [weight.view for weight in weights]
        self._stacks: list[_Stack] = []
        self._starts: dict[tuple[int, ...], Tensor] = {}

    @torch.no_grad()
    def measured(self) -> list[Tensor]:
        """Return what `rows` is to receive, as the device computes it."""
        shapes = [(min(view.shape), max(view.shape)) for view in self._views]
        kinds = [(view.parameter.dtype, view.parameter.device) for view in self._views]
        groups = in_stacks(
            range(len(shapes)),
            key=lambda i: (shapes[i][0], *kinds[i]),
            entries=lambda i: shapes[i][0] ** 2,
        )
        self._stacks = []
        for group in groups:
            parts = in_stacks(group, lambda i: shapes[i][1], lambda i: math.prod(shapes[i]))
            with full_precision(kinds[group[0]][1].type):
                self._stacks.append(self._stack([*parts]))
        return [number for stack in self._stacks for number in stack.numbers]

    def _stack(self, parts: Sequence[Sequence[int]]) -> _Stack:
        scales, grams = zip(*(_scaled_gram([*self._wide(part)]) for part in parts), strict=True)
        places = tuple(place for part in parts for place in part)
        gram = grams[0] if len(grams) == 1 else torch.cat(grams)
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        centre = diagonal.mean(-1)
        diagonal.sub_(centre[:, None])
        spread = torch.linalg.vector_norm(gram, dim=(-2, -1))
        # The sine of squares looks random: it has a share in every structured vector.
        start = torch.arange(gram.shape[-1], device=gram.device, dtype=gram.dtype).square().sin()
        start = (start / torch.linalg.vector_norm(start)).expand(len(places), -1)
        known = self._starts.get(places)
        if known is not None and known.shape == start.shape:
            start = known.to(start) + NEW * start
            start = start / torch.linalg.vector_norm(start, dim=-1, keepdim=True)
        vectors = _krylov(gram, start, COLD if known is None else WARM)
        products = vectors @ vectors.mT, vectors @ gram @ vectors.mT
        diagonal.zero_()
        beside = gram.amax((-2, -1)), gram.amin((-2, -1))
        return _Stack(places, vectors, (torch.cat(scales), centre, spread, *beside, *products))

    def _wide(self, part: Sequence[int]) -> Iterator[Tensor]:
        """Yield weights, transposed if they have more rows than columns."""
        for place in part:
            matrix = read(self._views[place].tensor())
            yield matrix if len(matrix) <= matrix.shape[1] else matrix.mT

    @torch.no_grad()
    def rows(self, numbers: Sequence[Tensor]) -> list[dict[str, Any]]:
        """Return the numbers of each weight, NaN if it holds NaN or infinity."""
        rows: dict[int, dict[str, Any]] = {}
        coming = iter(numbers)
        for stack in self._stacks:
            *columns, among, inside = islice(coming, len(stack.numbers))
            sizes, turned = torch.linalg.eigh(among.nan_to_num(0.0, 0.0, 0.0))
            # Vectors that rounding made of the others are left out.
            weights = sizes.rsqrt().where(sizes > INDEPENDENT, 0.0)
            white = turned * weights[:, None]
            values, vectors = torch.linalg.eigh(
                (white.mT @ inside @ white).nan_to_num(0.0, 0.0, 0.0)
            )
            top = (white @ vectors[..., -1:]).to(stack.vectors)
            self._starts[stack.places] = (stack.vectors.mT @ top).squeeze(-1)
            size = stack.vectors.shape[-1]
            columns.append(values[:, -1])
            lines = zip(*(column.tolist() for column in columns), strict=True)
            rows |= dict(zip(stack.places, (_row(size, *line) for line in lines), strict=True))
        self._stacks = []
        return [rows[place] for place in range(len(rows))]


def _scaled_gram(matrices: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the Frobenius norms of matrices, and the Gram matrices of the rows over them."""
    wide = torch.promote_types(matrices[0].dtype, torch.float32)
    lengths = stacked(norms(matrices, torch.float64))
    scale = lengths.to(wide).clamp_min(torch.finfo(wide).tiny)[:, None, None]
    rows, columns = matrices[0].shape
    width = max(1, ENTRIES // (len(matrices) * rows))
    gram = None
    for start in range(0, columns, width):
        part = stacked([matrix[:, start : start + width] for matrix in matrices]).to(wide) / scale
        gram = part @ part.mT if gram is None else gram.baddbmm_(part, part.mT)
    assert gram is not None
    return lengths, gram


def _krylov(gram: Tensor, start: Tensor, steps: int) -> Tensor:
    """Return unit vectors that span ``start, start G, ..``, shape (matrices, steps, rows), orthogonal
    up to what rounding leaves of short ones."""
    vectors = gram.new_zeros(len(gram), min(steps, gram.shape[-1]), gram.shape[-1])
    vectors[:, 0] = start
    for step in range(1, vectors.shape[1]):
        known = vectors[:, :step]
        image = known[:, -1:] @ gram
        image = torch.baddbmm(image, image @ known.mT, known, alpha=-1)
        length = torch.linalg.vector_norm(image, dim=-1, keepdim=True)
        vectors[:, step : step + 1] = image / length.clamp_min(torch.finfo(gram.dtype).tiny)
    return vectors


def _row(  # noqa: PLR0917 (in the order of a stack's numbers)
    size: int,
    length: float,
    centre: float,
    spread: float,
    high: float,
    low: float,
    above: float,
) -> dict[str, Any]:
    square = spread**2 + size * centre**2  # of the Frobenius norm of G
    top = max(0.0, centre + max(0.0, above))
    return {
        "scale_free_orthogonality_error": spread / math.sqrt(square) if square else None,
        "orthogonality_error": max(high, -low) * length**2,
        "sigma_max": length * math.sqrt(top) if math.isfinite(length) else math.nan,
        "stable_rank": size * centre / top if top else None,
    }
