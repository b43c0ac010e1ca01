"""Norms of convolutions of any length, from above (theory note B20)."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.linalg import certified_spectral_norm
from wellposed.torch_modes import on_the_cpu

# Points of the grid over a frequency for each tap beyond the first, from fine to coarse.
_FINENESS = (32, 16, 8, 4)
_WORK = 4e9
"""Multiply-adds that the eigenvalues of a grid may take."""
_ROUNDING = 1e-14


@on_the_cpu
def convolution_norm(kernel: Tensor, *, stride: tuple[int, ...] = (1,), groups: int = 1) -> float:
    """Return an upper bound of the 2-norm of a convolution, for signals of every length.

    Status: certified, rounding included, for zero padding of any width and, with stride 1, for
    circular padding; dilation changes nothing. The norm of the convolution of infinite signals is
    the largest norm of the matrix ``K(w) = sum_k K_k e^(i w k)`` over frequencies w; zero padding
    restricts it, and circular padding takes some of the w. The largest on a grid of N frequencies
    exceeds ``cos(pi (n - 1) / N)`` times the square of the largest of all, n being the taps (Ehlich
    and Zeller 1964). The sum of the norms of all taps is taken if it is smaller, or if the grid is
    too costly. Theory note B20.

    Args:
        kernel: ``(out, in / groups, taps, ...)``, one or two dimensions of taps.
        stride: One number a dimension; only if the padding is zero.
        groups: Number of groups of channels.

    Cost: eigenvalues of a matrix of the channels for each frequency, about 1 second at most.

    >>> round(convolution_norm(torch.ones(1, 1, 2)), 2)
    2.0
    """
    kernel = kernel.detach().to("cpu", torch.float64)
    parts = kernel.chunk(groups)
    norms = [_norm(_by_phases(part, stride)) for part in parts]
    return max(norms)


def _by_phases(kernel: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return the kernel of stride 1 on channels that are the phases of the old ones."""
    for axis, step in enumerate(stride, start=2):
        if step == 1:
            continue
        taps = kernel.shape[axis]
        padding = [0, 0] * (kernel.ndim - axis - 1) + [0, -taps % step]
        kernel = F.pad(kernel, padding).movedim(axis, -1)
        # (out, in, ..., taps) -> (out, in step, ..., taps / step)
        kernel = kernel.unflatten(-1, (-1, step)).movedim(-1, 2).flatten(1, 2).movedim(-1, axis)
    return kernel


def _norm(kernel: Tensor) -> float:
    taps = kernel.shape[2:]
    rows, columns = kernel.shape[:2]
    # (out, in, taps...) -> (taps, out, in)
    matrices = kernel.flatten(2).movedim(-1, 0)
    by_taps = float(certified_spectral_norm(matrices).sum())
    if math.prod(taps) == 1:
        return by_taps

    for fineness in _FINENESS:
        sizes = [1 if count == 1 else fineness * (count - 1) for count in taps]
        # Frequencies w and -w have conjugate matrices.
        points = math.prod(sizes) / 2
        if (
            points * 8 * min(rows, columns) ** 2 * (10 * min(rows, columns) + max(rows, columns))
            < _WORK
        ):
            return min(by_taps, _on_grid(matrices, taps, sizes))

    return by_taps


def _on_grid(matrices: Tensor, taps: torch.Size, sizes: list[int]) -> float:
    """Return the bound by the largest norm on a grid of frequencies."""
    largest = 0.0
    frequencies = itertools.product(*(range(size) for size in sizes))
    half = [point for point in frequencies if point <= _opposite(point, sizes)]
    positions = torch.tensor(list(itertools.product(*(range(count) for count in taps))))
    for start in range(0, len(half), 256):
        points = torch.tensor(half[start : start + 256])
        turns = torch.zeros(len(points), len(positions), dtype=torch.float64)
        for axis, size in enumerate(sizes):
            whole_turns = points[:, axis, None] * positions[None, :, axis] % size
            turns = turns + whole_turns.double() / size
        angles = 2 * math.pi * turns
        # f: frequencies, k: taps, i: out, j: in
        real = torch.einsum("fk,kij->fij", angles.cos(), matrices)
        imaginary = torch.einsum("fk,kij->fij", angles.sin(), matrices)
        upper = torch.cat((real, -imaginary), dim=-1)
        lower = torch.cat((imaginary, real), dim=-1)
        norms = certified_spectral_norm(torch.cat((upper, lower), dim=-2))
        largest = max(largest, float(norms.max()))

    cosines = (
        math.cos(math.pi * (count - 1) / size)
        for count, size in zip(taps, sizes, strict=True)
        if count > 1
    )
    sizes_of_taps = float(matrices.flatten(1).norm(dim=1).sum())
    rounding = _ROUNDING * (len(positions) + 16) * sizes_of_taps
    return (largest + rounding) / math.sqrt(math.prod(cosines)) * (1 + 1e-12)


def _opposite(point: tuple[int, ...], sizes: list[int]) -> tuple[int, ...]:
    return tuple(-index % size for index, size in zip(point, sizes, strict=True))
