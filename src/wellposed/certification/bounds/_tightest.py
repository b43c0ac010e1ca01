"""Smallest bound of linear maps and activations in sequence that a proof with multipliers gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.certification.bounds._branch import branch_bound, branch_square, searched_branches
from wellposed.certification.bounds._chain import (
    chain_square,
    searched_chain,
    unsearched_chain,
)
from wellposed.certification.bounds._network import Link, Matrix, Network, network_of
from wellposed.linalg import certified_spectral_norm
from wellposed.torch_modes import on_the_cpu

_NEARLY_ISOMETRIC = 0.95
"""Root mean square of the singular values over the largest from which multipliers win too little."""
BRANCH = "multipliers (B18)"
LINEAR = "norm of the product of matrices"
CHAIN = "multipliers of a chain (B19)"


@dataclass(frozen=True, eq=False)
class Tight:
    """A bound by multipliers, its form, and its value as a function of the weights."""

    value: float
    form: str
    squared: Callable[[Network], Tensor] | None = None
    """rho of a network of the same shapes, the multipliers of the proof held fixed."""


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

    try:
        if is_isometric:
            return _of_chain(0.0, scale, *unsearched_chain(network, scale))
        return _by_depth(network, skip, scale)
    except torch.linalg.LinAlgError:
        # An eigenvalue of a search that does not converge; other forms remain.
        return NO_BOUND


def _by_depth(network: Network, skip: float, scale: float) -> Tight:
    if len(network.weights) == 1:
        return Tight(_linear_bound(network, skip, scale), LINEAR)
    if len(network.weights) == 2:
        (bound,), used = searched_branches([network], [skip], [scale])
        if used is None:
            return NO_BOUND
        return Tight(bound, BRANCH, lambda live: branch_square(live, skip, scale, used[0]))
    bound, multipliers = searched_chain(network, skip, scale)
    if math.isinf(bound) and not skip:
        return Tight(abs(scale) * _by_pairs(network), f"{BRANCH}, two maps at a time")
    return _of_chain(skip, scale, bound, multipliers)


def _of_chain(skip: float, scale: float, bound: float, multipliers: Sequence[Tensor]) -> Tight:
    return Tight(bound, CHAIN, lambda live: chain_square(live, skip, scale, multipliers))


@on_the_cpu
def tight_slope(links: Sequence[Link], tight: Tight) -> Tensor | None:
    """Return a bound by multipliers with the gradient of the weights, or None if it has none."""
    if tight.squared is None:
        return None
    network = network_of([link.live() if isinstance(link, Matrix) else link for link in links])
    return None if network is None else tight.squared(network).sqrt()


def _linear_bound(network: Network, skip: float, scale: float) -> float:
    """Bound a linear map, with a margin for the rounding of ``s I + c W``."""
    (weight,) = network.weights
    matrix = scale * weight
    if skip:
        matrix = matrix + skip * torch.eye(len(matrix), dtype=matrix.dtype)
    lost = 1e-15 * (abs(scale) * float(weight.norm()) + abs(skip) * len(weight) ** 0.5)
    return float(certified_spectral_norm(matrix)) + lost + abs(scale) * network.excess


def _is_nearly_isometric(link: Matrix) -> bool:
    rank = min(link.weight.shape)
    mean = float(link.weight.detach().double().square().sum()) / max(rank, 1)
    return link.norm < math.inf and math.sqrt(mean) >= _NEARLY_ISOMETRIC * link.norm


def _by_pairs(network: Network) -> float:
    """Return the product of the bounds of two linear maps at a time, for wide and deep networks."""
    total = 1.0
    weights = list(network.weights)
    slopes = list(network.slopes)
    while weights:
        if len(weights) == 1:
            total *= float(certified_spectral_norm(weights[0]))
            break
        pair = Network(tuple(weights[:2]), tuple(slopes[:1]), 0.0)
        total *= branch_bound([pair], [0.0], [1.0])[0]
        if len(slopes) > 1:
            mid, half = slopes[1]
            total *= float((mid.abs() + half).max()) * (1 + 1e-15)
        del weights[:2], slopes[:2]

    # Each factor is an upper bound; their product is rounded once a factor.
    return total * (1 + 1e-14 * len(network.weights)) + network.excess
