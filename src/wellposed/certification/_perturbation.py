"""How much one row of softmax attention can move: diagnostics, not certificates (theory note B10, B11)."""

from __future__ import annotations

import torch
from torch import Tensor

from wellposed.linalg import certified_spectral_norm


def softmax_jacobian_bound(probabilities: Tensor) -> Tensor:
    """Return ``p1 (1 - p1 + p2) >= |diag p - p p^T|_2``, at most 1/2, with ``p1 >= p2`` the two largest entries (B10).

    Certified for each row, with equality iff every other non-zero entry equals ``p2``; small where attention is
    saturated, so it shows where gradients die. ``1 - p1`` is taken as the sum of the others: near ``p1 = 1`` the
    difference would lose all digits.

    Args:
        probabilities: ``(..., n)``, rows summing to 1.

    Returns:
        ``(...)`` of the same dtype.

    Cost: O(n). A diagnostic of one row at one input, no Lipschitz constant of attention.

    >>> softmax_jacobian_bound(torch.tensor([0.5, 0.5]))
    tensor(0.5000)
    """
    if probabilities.shape[-1] == 1:
        return torch.zeros_like(probabilities[..., 0])
    ordered = probabilities.sort(-1, descending=True).values
    rest = ordered[..., 1:].flip(-1).sum(-1)
    return ordered[..., 0] * (rest + ordered[..., 1])


def affinity_perturbation_bound(key: Tensor, query_change: Tensor, *, scale: float) -> Tensor:
    """Return ``min(sqrt 2, 1/2 scale |K - 1 kbar^T|_2 |eps|) >= |A'_i - A_i|``: query noise ``eps``, keys fixed (B11).

    Certified. Zhang et al. (2021), Theorem 2.1, with the constant 1/2 in place of 2 (softmax is 1/2-Lipschitz in the
    2-norm, Gao and Pavel 2017) and the keys centred (softmax ignores a common shift). Tight for two opposite keys.

    Args:
        key: ``(..., n, d)``.
        query_change: ``(..., m, d)``, the perturbation of each query.
        scale: factor of the logits, usually ``1/sqrt(d)``.

    Returns:
        ``(..., m)``. Only the queries move: in self-attention the keys move too, and no such bound exists off a ball.

    >>> float(affinity_perturbation_bound(torch.zeros(3, 2), torch.ones(1, 2), scale=1.0))
    0.0
    """
    centred = key - key.mean(-2, keepdim=True)
    size = certified_spectral_norm(centred).to(query_change.dtype)
    moved = 0.5 * abs(scale) * size.unsqueeze(-1) * query_change.norm(dim=-1)
    return moved.clamp_max(2**0.5)
