"""Differential entropy of hidden values (equation 6), by nearest neighbours."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from wellposed.errors import ShapeError


def differential_entropy(x: Tensor, neighbors: int = 3) -> Tensor:
    """Estimate the entropy ``h = -E log p(x)``, in nats, of the values along the last axis.

    Status: empirical; consistent, with a bias that falls as 1/n for smooth densities. Source:
    Kozachenko and Leonenko (1987), as the paper names none: ``psi(n) - psi(k) + log 2 + mean log
    r_i``, r_i the distance to the k-th neighbour. Depends on scale: ``h(s x) = h(x) + log s``.

    Args:
        x: (..., n), finite.
        neighbors: k; more give less variance and more bias.

    Returns:
        (...), float64. ``-inf`` if some value occurs more than ``neighbors`` times.

    Raises:
        ShapeError: no more values than ``neighbors``.

    >>> x = 4 * torch.rand(50_000, generator=torch.Generator().manual_seed(0))  # log 4 = 1.386
    >>> round(differential_entropy(x).item(), 1)
    1.4
    """
    count = x.shape[-1]
    if count <= neighbors:
        raise ShapeError(f"differential_entropy: {count} values; expected more than {neighbors}")

    ordered = x.detach().double().sort(-1).values
    padded = torch.nn.functional.pad(ordered, (neighbors, 0), value=-math.inf)
    padded = torch.nn.functional.pad(padded, (0, neighbors), value=math.inf)
    # The k nearest lie in one of the k + 1 windows of k + 1 sorted values that contain the value.
    radius = torch.full_like(ordered, math.inf)
    for first in range(neighbors + 1):
        last = first + neighbors
        left = ordered - padded[..., first : first + count]
        right = padded[..., last : last + count] - ordered
        radius = torch.minimum(radius, torch.maximum(left, right))
    psi = torch.digamma(torch.tensor([float(count), float(neighbors)], dtype=torch.float64))

    return float(psi[0] - psi[1]) + math.log(2.0) + radius.log().mean(-1)


def layer_entropy(states: Sequence[Tensor], attention_mask: Tensor, heads: int = 1) -> Tensor:
    """Return ``E_j h(x_j)``, (states, heads): the mean entropy of the values of real tokens.

    Status: empirical; see `differential_entropy`. With fewer than about 50 values a head the bias
    reaches a tenth of a nat.

    Args:
        states: tensors (batch, tokens, width).
        attention_mask: (batch, tokens), 1 for real tokens.
        heads: number of equal slices of the width to measure separately: heads or experts.

    >>> x = torch.randn(1, 4, 64)
    >>> tuple(layer_entropy([x, 10 * x], torch.ones(1, 4), heads=2).shape)
    (2, 2)
    """
    parts = (state[attention_mask != 0].unflatten(-1, (heads, -1)) for state in states)
    return torch.stack([differential_entropy(part).mean(0) for part in parts])
