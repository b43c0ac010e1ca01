"""Smallest bound of linear maps and activations in sequence that a proof with multipliers gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wellposed.certification.bounds._branch import branch_square, searched_branches
from wellposed.certification.bounds._chain import (
    chain_square,
    searched_chain,
    unsearched_chain,
)
from wellposed.certification.bounds._network import Link, Matrix, Network, network_of
from wellposed.certification.bounds._search import smooth_largest
from wellposed.linalg import certified_spectral_norm
from wellposed.torch_modes import on_the_cpu

_NEARLY_ISOMETRIC = 0.95
"""Root mean square of the singular values over the largest from which multipliers win too little."""
BRANCH = "multipliers (B18)"
LINEAR = "norm of the product of matrices"
CHAIN = "multipliers of a chain (B19)"
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, eq=False)
class Tight:
    """A bound by multipliers, its form, and its value as a function of the weights."""

    value: float
    form: str
    live: Callable[[Network], Tensor] | None = None
    """The bound of a network of the same shapes, the multipliers of the proof held fixed."""


NO_BOUND = Tight(math.inf, "")


@on_the_cpu
def tightest_bound(links: Sequence[Link], skip: float = 0.0, scale: float = 1.0) -> Tight:
    """Return a bound of ``s x + c f(x)`` in the 2-norm, f being the links in sequence.

    Infinite if there are fewer than two linear maps, or if nothing is proved. If all of them are
    nearly orthogonal, multipliers win little: only chains of three or more have a bound, without a
    search and without a skip.
    """
    matrices = [link for link in links if isinstance(link, Matrix)]
    is_isometric = all(map(_is_nearly_isometric, matrices))
    if len(matrices) < (3 if is_isometric else 2) or (is_isometric and skip):
        return NO_BOUND

    with torch.no_grad():
        network = network_of(links)
    if network is None or not network.is_usual:
        return NO_BOUND

    # An idle unit has no best multiplier: it is 0, or infinite.
    units = network.units_in_use()
    used = network.only(units)
    try:
        if is_isometric:
            tight = _of_chain(0.0, scale, *unsearched_chain(used, scale))
        else:
            tight = _by_depth(used, skip, scale)
    except torch.linalg.LinAlgError:
        # An eigenvalue of a search that does not converge; other forms remain.
        return NO_BOUND

    live = tight.live
    return tight if live is None else replace(tight, live=lambda changed: live(changed.only(units)))


def _by_depth(network: Network, skip: float, scale: float) -> Tight:
    if len(network.weights) == 1:
        bound = _linear_bound(network, skip, scale)
        return Tight(bound, LINEAR, lambda live: _norm(_one_map(live, skip, scale)))
    if len(network.weights) == 2:
        return _of_branch(network, skip, scale)
    bound, multipliers = searched_chain(network, skip, scale)
    if math.isinf(bound) and not skip:
        return _by_pairs(network, scale)
    return _of_chain(skip, scale, bound, multipliers)


def _of_branch(network: Network, skip: float, scale: float) -> Tight:
    (bound,), used = searched_branches([network], [skip], [scale])
    if used is None:
        return NO_BOUND
    return Tight(bound, BRANCH, lambda live: _root(branch_square(live, skip, scale, used[0])))


def _of_chain(skip: float, scale: float, bound: float, multipliers: Sequence[Tensor]) -> Tight:
    return Tight(bound, CHAIN, lambda live: _root(chain_square(live, skip, scale, multipliers)))


def _root(square: Tensor) -> Tensor:
    """Return the square root, whose gradient is 0 at 0."""
    return square.clamp_min(_TINY).sqrt()


def _norm(matrix: Tensor) -> Tensor:
    """Return the largest singular value, to differentiate."""
    is_wide = matrix.shape[-2] < matrix.shape[-1]
    return _root(smooth_largest(matrix @ matrix.mT if is_wide else matrix.mT @ matrix))


@on_the_cpu
def tight_slope(links: Sequence[Link], tight: Tight) -> Tensor | None:
    """Return a bound by multipliers with the gradient of the weights, or None if it has none."""
    if tight.live is None:
        return None
    network = network_of([link.live() if isinstance(link, Matrix) else link for link in links])
    return None if network is None else tight.live(network)


def _one_map(network: Network, skip: float, scale: float) -> Tensor:
    (weight,) = network.weights
    matrix = scale * weight
    return matrix + skip * torch.eye(len(matrix), dtype=matrix.dtype) if skip else matrix


def _linear_bound(network: Network, skip: float, scale: float) -> float:
    """Bound a linear map, with a margin for the rounding of ``s I + c W``."""
    (weight,) = network.weights
    lost = 1e-15 * (abs(scale) * float(weight.norm()) + abs(skip) * len(weight) ** 0.5)
    norm = float(certified_spectral_norm(_one_map(network, skip, scale)))
    return norm + lost + abs(scale) * network.excess


def _is_nearly_isometric(link: Matrix) -> bool:
    rank = min(link.weight.shape)
    mean = float(link.weight.detach().double().square().sum()) / max(rank, 1)
    return link.norm < math.inf and math.sqrt(mean) >= _NEARLY_ISOMETRIC * link.norm


def _by_pairs(network: Network, scale: float) -> Tight:
    """Return the product of the bounds of two linear maps at a time, for wide and deep networks."""
    parts = [_of_part(part) for part in _pairs(network)]
    # Each factor is an upper bound; their product is rounded once a factor.
    total = math.prod(part.value for part in parts) * _steepness(network)
    total = total * (1 + 1e-14 * len(network.weights)) + network.excess

    def live(one: Network) -> Tensor:
        product = torch.tensor(abs(scale) * _steepness(one), dtype=torch.float64)
        for part, inside in zip(parts, _pairs(one), strict=True):
            product = product * (part.value if part.live is None else part.live(inside))
        return product

    return Tight(abs(scale) * total, f"{BRANCH}, two maps at a time", live)


def _pairs(network: Network) -> list[Network]:
    """Return two linear maps at a time, with the activation between them."""
    weights = network.weights
    return [
        Network(weights[start : start + 2], network.slopes[start : start + 1], 0.0)
        for start in range(0, len(weights), 2)
    ]


def _of_part(network: Network) -> Tight:
    if len(network.weights) == 2:
        return _of_branch(network, 0.0, 1.0)
    bound = float(certified_spectral_norm(network.weights[0]))
    return Tight(bound, LINEAR, lambda live: _norm(live.weights[0]))


def _steepness(network: Network) -> float:
    """Bound the product of the slopes of the activations between the pairs."""
    between = network.slopes[1::2]
    return math.prod(float((mid.abs() + half).max()) * (1 + 1e-15) for mid, half in between)
