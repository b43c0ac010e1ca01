"""Largest singular values of every weight of a BERT-size encoder: Lanczos to 1e-3 against ``torch.linalg.svdvals``.

Run with one thread: ``OMP_NUM_THREADS=1 python benchmarks/measure.py``. One layer (four 768 x 768, two of 3072 x 768)
stands for twelve, since the cost is per matrix; A and B alternate in one process and the median of the rounds counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from wellposed.linalg import lanczos_singular_value, largest_singular_value

LAYERS = 12


def spectra() -> dict[str, Callable[[int, int], Tensor]]:
    """Weights with the spectra that occur: Gaussian initialisation, trained (power law), flat top, near-orthogonal."""

    def shaped(values: Callable[[int], Tensor]) -> Callable[[int, int], Tensor]:
        def make(rows: int, cols: int) -> Tensor:
            k = min(rows, cols)
            left = torch.linalg.qr(torch.randn(rows, k))[0]
            right = torch.linalg.qr(torch.randn(cols, k))[0]
            return (left * values(k)) @ right.T

        return make

    return {
        "gaussian N(0, .02)": lambda rows, cols: 0.02 * torch.randn(rows, cols),
        "power law 8 i^-1/2": shaped(lambda k: 8 * torch.arange(1, k + 1.0) ** -0.5),
        "flat top sqrt(1 - i/k)": shaped(lambda k: (1 - torch.arange(k) / k).sqrt()),
        "near-orthogonal 1 +- .03": shaped(lambda k: 1 + 0.03 * (2 * torch.rand(k) - 1)),
    }


def layer(make: Callable[[int, int], Tensor], width: int) -> list[Tensor]:
    """The six weights of one encoder layer."""
    return [*(make(width, width) for _ in range(4)), make(4 * width, width), make(width, 4 * width)]


def milliseconds(call: Callable[[Tensor], object], weights: list[Tensor]) -> float:
    """Process time of one pass over the weights."""
    start = time.process_time()
    for weight in weights:
        call(weight)
    return 1e3 * (time.process_time() - start)


def main() -> None:
    """Print one row per spectrum."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"| spectrum, {LAYERS} layers, d = {arguments.width} | svdvals s | Lanczos s | ratio | steps | worst error |")
    print("|---|---|---|---|---|---|")
    for name, make in spectra().items():
        weights = layer(make, arguments.width)
        exact = [torch.linalg.svdvals(weight.double())[0].item() for weight in weights]
        found = [lanczos_singular_value(weight) for weight in weights]
        error = max(abs(1 - f.value / e) for f, e in zip(found, exact, strict=True))
        rounds = [
            (milliseconds(torch.linalg.svdvals, weights), milliseconds(largest_singular_value, weights))
            for _ in range(arguments.rounds)
        ]
        svd, lanczos = (statistics.median(column) for column in zip(*rounds, strict=True))
        steps = f"{min(f.steps for f in found)}-{max(f.steps for f in found)}"
        seconds = LAYERS / 1e3
        print(
            f"| {name} | {svd * seconds:.2f} | {lanczos * seconds:.2f} | {svd / lanczos:.1f} | {steps} | {error:.1e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
