"""Time and tightness of certified spectral norms: Cholesky against the eigensolver, random and nearly equal spectra.

    python benchmarks/norms.py [--rounds 9] [--threads 1]

Methods are interleaved round by round and compared by medians of process CPU time. `above` is the bound over the
largest singular value (float64 SVD), less one; `cholesky` promises at most 1e-4, `svd` adds 1e-6.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from wellposed.linalg import SpectralMethod, certified_spectral_norm

METHODS: tuple[SpectralMethod, ...] = ("svd", "cholesky")


def matrices() -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a Transformer, at random and near orthogonal."""
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((192, 192), (512, 512), (512, 2048), (768, 768), (768, 2304), (768, 3072)):
        yield f"random {rows} x {columns}", torch.randn(rows, columns, generator=generator)
    for size in (192, 512, 768):
        orthogonal = torch.linalg.qr(torch.randn(size, size, generator=generator)).Q
        left, right = torch.randn(2, size, generator=generator)
        yield f"orthogonal {size}", orthogonal
        yield f"orthogonal + rank one {size}", orthogonal + torch.outer(left / left.norm(), right / right.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| matrix | svd ms | cholesky ms | svd above | cholesky above |\n|---|---|---|---|---|")
    for name, weight in matrices():
        times: dict[str, list[float]] = {method: [] for method in METHODS}
        above: dict[str, float] = {}
        true = float(torch.linalg.matrix_norm(weight.double(), 2))
        for _ in range(options.rounds):
            for method in METHODS:
                start = time.process_time()
                bound = float(certified_spectral_norm(weight, method=method))
                times[method].append(1e3 * (time.process_time() - start))
                above[method] = bound / true - 1
        cells = [f"{statistics.median(times[method]):.1f}" for method in METHODS]
        cells += [f"{above[method]:.1e}" for method in METHODS]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
