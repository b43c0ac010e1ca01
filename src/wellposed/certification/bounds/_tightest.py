"""Smallest bound of linear maps and activations in sequence that a proof with multipliers gives."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from wellposed.certification.bounds._branch import branch_bound
from wellposed.certification.bounds._chain import chain_bound
from wellposed.certification.bounds._network import Link, Matrix, Network, network_of
from wellposed.linalg import certified_spectral_norm

_NEARLY_ISOMETRIC = 0.95
"""Root mean square of the singular values over the largest from which multipliers win too little."""
BRANCH = "multipliers (B18)"
LINEAR = "norm of the product of matrices"
CHAIN = "multipliers of a chain (B19)"


def tightest_bound(
    links: Sequence[Link], skip: float = 0.0, scale: float = 1.0
) -> tuple[float, str]:
    """Return a bound of ``s x + c f(x)`` in the 2-norm, f the links in sequence, and its form.

    Infinite if there are fewer than two linear maps, if all are nearly orthogonal (multipliers
    then win little), or if nothing is proved.
    """
    if not may_win(links):
        return math.inf, ""
    network = network_of(links)
    if network is None or not network.is_usual:
        return math.inf, ""
    try:
        return _by_depth(network, skip, scale)
    except torch.linalg.LinAlgError:
        # An eigenvalue of a search that does not converge; other forms remain.
        return math.inf, ""


def _by_depth(network: Network, skip: float, scale: float) -> tuple[float, str]:
    if len(network.weights) == 1:
        return _linear_bound(network, skip, scale), LINEAR
    if len(network.weights) == 2:
        return branch_bound([network], [skip], [scale])[0], BRANCH
    bound = chain_bound(network, skip, scale)
    if math.isinf(bound) and not skip:
        return abs(scale) * _by_pairs(network), f"{BRANCH}, two maps at a time"
    return bound, CHAIN


def _linear_bound(network: Network, skip: float, scale: float) -> float:
    """Bound a linear map, with a margin for the rounding of ``s I + c W``."""
    (weight,) = network.weights
    matrix = scale * weight
    if skip:
        matrix = matrix + skip * torch.eye(len(matrix), dtype=matrix.dtype)
    lost = 1e-15 * (abs(scale) * float(weight.norm()) + abs(skip) * len(weight) ** 0.5)
    return float(certified_spectral_norm(matrix)) + lost + abs(scale) * network.excess


def may_win(links: Sequence[Link]) -> bool:
    """Return whether some linear map is far from a multiple of an isometry, and there are two."""
    matrices = [link for link in links if isinstance(link, Matrix)]
    return len(matrices) > 1 and not all(map(_is_nearly_isometric, matrices))


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
