"""Time and tightness of certified spectral norms, Cholesky and eigensolver, on several spectra.

"Above" is the bound over the largest singular value (float64 SVD), minus one; `cholesky` promises
at most 1e-4.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.rows import Benchmark, Goal, Row, Setup, ratio_row, single
from wellposed.linalg import SpectralMethod, certified_spectral_norm

METHODS: tuple[SpectralMethod, ...] = ("svd", "cholesky")
SHAPES = ((192, 192), (512, 512), (512, 2048), (768, 768), (768, 2304), (768, 3072))


def matrices(
    shapes: tuple[tuple[int, int], ...], sizes: tuple[int, ...]
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights of a Transformer, random and near orthogonal."""
    generator = torch.Generator().manual_seed(0)
    for rows, columns in shapes:
        yield f"random {rows} x {columns}", torch.randn(rows, columns, generator=generator)
    for size in sizes:
        orthogonal = torch.linalg.qr(torch.randn(size, size, generator=generator)).Q
        left, right = torch.randn(2, size, generator=generator)
        yield f"orthogonal {size}", orthogonal
        yield (
            f"orthogonal + rank one {size}",
            orthogonal + torch.outer(left / left.norm(), right / right.norm()),
        )


def rows(setup: Setup) -> Iterator[Row]:
    for name, weight in matrices(setup.size(SHAPES, ((8, 8),)), setup.size((192, 512, 768), (8,))):
        true = float(torch.linalg.matrix_norm(weight.double(), 2))
        sides = {
            method: partial(certified_spectral_norm, weight, method=method) for method in METHODS
        }
        yield ratio_row(
            f"svd / cholesky, {name}", setup.interleave(sides, 9), "cholesky", "svd", inverse=True
        )
        bound = float(certified_spectral_norm(weight, method="cholesky"))
        yield single(f"cholesky above the true norm, {name}", bound / true - 1)


BENCHMARK = Benchmark(
    "the certified spectral norm by Cholesky over that by the eigensolver, and its distance above the true norm",
    "at most 1e-4 above", 1, rows, goals=(Goal("cholesky above*", "<= 1e-4"),),
)  # fmt: skip
