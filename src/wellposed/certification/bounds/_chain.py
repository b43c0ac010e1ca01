"""Bounds of ``x -> s x + c W_n phi_(n-1)(... W_1 x)`` by one multiplier a unit (theory note B19).

Every slope of unit j of phi_i lies in [a, b]. With multipliers T_i > 0, ``|f(x) - f(y)|^2 <= rho
|x - y|^2`` if the matrix of the blocks of `_blocks`, one for each layer and one for the output, is
positive definite. Between neighbours alone it has entries (and between input and output, with a
skip), so its Cholesky factor is the recursion of ECLipsE (Xu and Sivaranjani 2024).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from wellposed.certification.bounds._network import Network
from wellposed.certification.bounds._rounding import MORE_TERMS, UNIT, check_positive
from wellposed.certification.bounds._search import (
    SLACKS,
    Ascent,
    smallest_proved,
    smooth_largest,
    top_weights,
)
from wellposed.errors import ConfigError
from wellposed.linalg import block_factor, proves_definite
from wellposed.torch_modes import on_the_cpu

_STEPS = 200
_RESTARTS = 2
_WORK = 2e10
"""Multiply-adds that the search may take."""
_LARGEST_WORK = 2e10
"""Multiply-adds of a factor beyond which there is no proof."""
_QUICK_WORK = 2.5e9
"""Multiply-adds of a factor up to which a chain is bounded without a search."""
_SLACKS = (1e-9, 1e-8, *SLACKS)
"""A narrow chain is proved this near; wide ones have more rounding."""
_STIFF = 30.0
_RATE = 0.3
_TEMPERATURE = 0.1
Blocks = dict[tuple[int, int], Tensor]


@on_the_cpu
def chain_bound(
    network: Network,
    skip: float = 0.0,
    scale: float = 1.0,
    *,
    multipliers: Sequence[Tensor] | None = None,
) -> float:
    """Return an upper bound of the Lipschitz constant of ``s x + c f(x)``, f a network, in norm 2.

    Status: certified, rounding included; infinite if no bound is proved. Source: LipSDP-Neuron
    (Fazlyab et al. 2019) in the blocks of ECLipsE (Xu and Sivaranjani 2024); theory note B19.

    Args:
        network: Linear maps and activations of any depth and widths.
        skip: s; other than 0 only if outputs are as wide as inputs.
        scale: c.
        multipliers: For each activation (width,), positive; a search proposes them by default.
            Whatever they are, the result is a bound.

    Raises:
        ConfigError: a multiplier is not a positive finite number.

    Cost: one block Cholesky factor a step of the search, O(depth width^3), on the CPU in float64.

    >>> from wellposed.certification.bounds import Matrix, Slopes, network_of
    >>> eye = Matrix(torch.eye(2))
    >>> round(chain_bound(network_of([eye, Slopes(0, 1), eye, Slopes(0, 1), eye])), 4)
    1.0
    """
    return searched_chain(network, skip, scale, multipliers=multipliers)[0]


@torch.no_grad()
def searched_chain(
    network: Network,
    skip: float = 0.0,
    scale: float = 1.0,
    *,
    multipliers: Sequence[Tensor] | None = None,
) -> tuple[float, list[Tensor]]:
    """Return the bound of `chain_bound`, and the multipliers of the proof."""
    work = _work(network, skip)
    if work > _LARGEST_WORK or not network.is_usual:
        return math.inf, []

    if multipliers is None:
        proposals = _proposed(network, skip, scale, int(_WORK / (6 * work + 1)))
    else:
        _check(multipliers, network)
        proposals = [[multiplier.to(torch.float64) for multiplier in multipliers]]

    # The best proposal may be too near the edge of the feasible ones to be proved.
    for proposal in proposals:
        bound = _proved(network, skip, scale, proposal)
        if math.isfinite(bound):
            return bound + abs(scale) * network.excess, proposal
    return math.inf, []


@torch.no_grad()
def unsearched_chain(network: Network, scale: float) -> tuple[float, list[Tensor]]:
    """Return the bound of one number a layer, as in ECLipsE-Fast, and the multipliers of its proof.

    For orthogonal weights it is the norm of the product of the matrices, below which no bound
    lies. Infinite if the factor takes too long to be worth it.
    """
    if _work(network, 0.0) > _QUICK_WORK:
        return math.inf, []
    return searched_chain(network, 0.0, scale, multipliers=_greedy(network))


def chain_square(
    network: Network, skip: float, scale: float, multipliers: Sequence[Tensor]
) -> Tensor:
    """Return rho for fixed multipliers, to differentiate by the weights; no proof."""
    matrix, _ = _reach(_blocks(network, skip, scale, multipliers))
    return smooth_largest(matrix)


def _work(network: Network, skip: float) -> float:
    """Estimate the multiply-adds of one factor."""
    sizes = [weight.shape for weight in network.weights]
    most = sum(rows**3 / 3 + rows * columns * (rows + columns) for rows, columns in sizes)
    last = network.weights[-1].shape[0]
    return most + (sum(last * columns**2 * 2 for _, columns in sizes) if skip else 0)


def _check(multipliers: Sequence[Tensor], network: Network) -> None:
    expected = [len(mid) for mid, _ in network.slopes]
    received = [multiplier.numel() for multiplier in multipliers]
    if expected != received:
        raise ConfigError(
            f"chain_bound: expected multipliers of widths {expected}, received {received}"
        )
    check_positive("chain_bound", multipliers)


def _blocks(network: Network, skip: float, scale: float, multipliers: Sequence[Tensor]) -> Blocks:
    """Return the blocks of the proof for rho = 1, without the last: input, layers, output.

    A unit's constraint ``(dw - a dz)(b dz - dw) >= 0`` has ``ab = mid^2 - half^2``.
    """
    first = network.weights[0]
    blocks: Blocks = {(0, 0): torch.eye(first.shape[1], dtype=first.dtype)}
    parts = zip(network.weights, network.slopes, multipliers, strict=False)
    for index, (weight, (mid, half), multiplier) in enumerate(parts):
        bent = (mid - half) * (mid + half) * multiplier
        blocks[index, index] = blocks[index, index] + (weight.mT * bent) @ weight
        blocks[index + 1, index] = -(mid * multiplier)[:, None] * weight
        blocks[index + 1, index + 1] = torch.diag(multiplier)

    output = len(network.weights)
    blocks[output, output - 1] = scale * network.weights[-1]
    if skip:
        straight = skip * torch.eye(first.shape[1], dtype=first.dtype)
        blocks[output, 0] = straight if output > 1 else blocks[output, 0] + straight
    return blocks


def _reach(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Return the matrix whose largest eigenvalue is rho, and whether the layers have a factor."""
    output = max(row for row, _ in blocks)
    width = blocks[output, output - 1].shape[0]
    # A large corner: only the rows of the factor are read.
    corner = torch.eye(width, dtype=torch.float64) * 1e300
    factor, exists = block_factor({**blocks, (output, output): corner})
    rows = [factor[output, column] for column in range(output) if (output, column) in factor]
    return sum(row @ row.mT for row in rows), exists  # type: ignore[return-value]


def _proposed(network: Network, skip: float, scale: float, most: int) -> list[list[Tensor]]:
    """Return multipliers by Adam from those of a layer's largest eigenvalue (as ECLipsE-Fast),
    points between both, and the latter."""
    start = _greedy(network)
    steps = min(_STEPS, most)
    if steps < 1:
        return [start]

    widths = [len(multiplier) for multiplier in start]
    nothing = torch.tensor(math.inf, dtype=torch.float64)
    ascent = Ascent(
        torch.cat(start).log(), nothing, rate=_RATE, temperature=_TEMPERATURE, restarts=_RESTARTS
    )
    for _ in range(steps):
        ascent.step(*_value_and_gradient(network, skip, scale, ascent, widths))
        if ascent.is_over():
            break

    first = torch.cat(start).log()
    shares = (0.0, 0.02, 0.2, 1.0)
    mixed = (ascent.best.lerp(first, share).exp() for share in shares)
    return [list(point.split(widths)) for point in mixed]


def _value_and_gradient(
    network: Network, skip: float, scale: float, ascent: Ascent, widths: list[int]
) -> tuple[Tensor, Tensor]:
    """Return rho and the gradient of its logarithm by log T."""
    with torch.enable_grad():
        point = ascent.point.detach().requires_grad_()
        matrix, exists = _reach(_blocks(network, skip, scale, point.exp().split(widths)))
        if not bool(exists) or not bool(matrix.isfinite().all()):
            return torch.tensor(math.inf, dtype=torch.float64), torch.zeros_like(point)
        value, vectors, weights = top_weights(matrix.detach(), ascent.temperature)
        lowered = ((matrix @ vectors) * vectors).sum(-2) @ weights
        (gradient,) = torch.autograd.grad(lowered, point)
    return value, gradient / value


def _greedy(network: Network) -> list[Tensor]:
    """Return one number a layer, such that the smallest eigenvalue of its block is as large as can
    be: twice over the largest eigenvalue of ``W X^-1 W'`` for slopes in [0, 1]."""
    first = network.weights[0]
    block = torch.eye(first.shape[1], dtype=torch.float64)
    multipliers: list[Tensor] = []
    for weight, (mid, half) in zip(network.weights, network.slopes, strict=False):
        size = _solved(block, weight)
        largest = float(torch.linalg.eigvalsh(size)[-1])
        number = _best_number(mid, half) / max(largest, 1e-300)
        multiplier = torch.full((len(weight),), number, dtype=torch.float64)
        # A unit of one slope is a constraint that any large multiplier enforces.
        multiplier = torch.where(half > 0, multiplier, _STIFF * multiplier)
        bent = (mid - half) * (mid + half) * multiplier
        before = block + (weight.mT * bent) @ weight
        centred = mid * multiplier
        block = torch.diag(multiplier) - centred[:, None] * _solved(before, weight) * centred
        block = (block + block.mT) / 2
        multipliers.append(multiplier)

    return multipliers


def _best_number(mid: Tensor, half: Tensor) -> float:
    """Return the l > 0 with the largest ``l - m^2 l^2 / (1 + (m^2 - h^2) l)``, m and h the largest."""
    bends = half > 0
    if not bool(bends.any()):
        return 1.0
    middle = float(mid[bends].abs().max())
    length = float(half[bends].max())
    return 1 / (length * (length + middle))


def _solved(block: Tensor, weight: Tensor) -> Tensor:
    """Return ``W X^-1 W'``."""
    factor, info = torch.linalg.cholesky_ex(block)
    if int(info):
        factor = torch.eye(len(block), dtype=block.dtype) * float(block.abs().max()) ** 0.5
    half = torch.linalg.solve_triangular(factor, weight.mT, upper=False)
    return half.mT @ half


def _proved(network: Network, skip: float, scale: float, multipliers: Sequence[Tensor]) -> float:
    blocks = _blocks(network, skip, scale, multipliers)
    matrix, exists = _reach(blocks)
    output = len(network.weights)
    if not bool(exists) or not bool(matrix.isfinite().all()):
        return math.inf
    guess = torch.linalg.eigvalsh(matrix)[-1:]
    errors = _errors(network, multipliers)
    identity = torch.eye(len(matrix), dtype=torch.float64)

    def proves(squares: Tensor) -> Tensor:
        matrix_and_corner = {**blocks, (output, output): squares * identity}
        return proves_definite(
            matrix_and_corner, [*errors, torch.zeros(len(matrix), dtype=torch.float64)]
        )[None]

    return float(smallest_proved(guess, proves, _SLACKS))


def _errors(network: Network, multipliers: Sequence[Tensor]) -> list[Tensor]:
    """Bound the rounding of the diagonal blocks: of ``W' (ab T) W``, and of its sum with T."""
    made = [torch.zeros(network.weights[0].shape[1], dtype=torch.float64)]
    made += [4 * UNIT * multiplier for multiplier in multipliers]
    parts = zip(network.weights, network.slopes, multipliers, strict=False)
    for index, (weight, (mid, half), multiplier) in enumerate(parts):
        # (mid - half) and (mid + half) may cancel, so their rounding is relative to both.
        bent = (mid.abs() + half).square() * multiplier
        sizes = bent @ weight.square()
        made[index] = made[index] + 2 * (len(weight) + MORE_TERMS) * UNIT * (sizes + 1)
    return [error.sqrt() for error in made]
