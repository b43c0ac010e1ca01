"""Entropy of softmax rows, and how strongly they react to a change of their logits."""

from __future__ import annotations

import torch
from torch import Tensor

from wellposed.errors import ShapeError


def attention_entropy(probabilities: Tensor) -> Tensor:
    """Return ``-sum_j p_j ln p_j`` of every row, in nats: 0 if one-hot, ``ln n`` if uniform over n
    keys.

    Status: exact to rounding of the computing dtype (at least float32); ``0 ln 0 = 0``.

    Args:
        probabilities: ``(..., queries, keys)``, rows not negative with sum 1; the result drops
            keys.

    Raises:
        ShapeError: no key, or a scalar.

    Cost: one pass. When not to use: on weights after dropout, whose rows do not sum to 1.

    >>> attention_entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]])).tolist()
    [0.6931471824645996, 0.0]
    """
    return torch.special.entr(probability_rows(probabilities)).sum(-1)


def softmax_sensitivity(probabilities: Tensor) -> Tensor:
    """Return ``p1 (1 - p1 + p2) >= |diag p - p p^T|_2``, the norm of the softmax Jacobian; at most
    1/2.

    Status: an upper bound of each row's Jacobian (theory note B10), up to rounding; equal if and
    only if all other non-zero probabilities equal the second largest, ``p2``. A diagnostic at this
    input, no certificate around it. Near 0 for saturated or spread rows, 1/2 if two keys share one.

    Args:
        probabilities: ``(..., queries, keys)``, rows not negative with sum 1; the result drops
            keys.

    Raises:
        ShapeError: no key, or a scalar.

    Cost: two passes over the matrix.

    >>> softmax_sensitivity(torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])).tolist()
    [0.5, 0.0]
    """
    rows = probability_rows(probabilities)
    first, index = rows.max(-1, keepdim=True)
    others = rows.scatter(-1, index, 0.0)  # 1 - p1 as a difference would lose the bound near 1
    return first[..., 0] * (others.sum(-1) + others.amax(-1))


def probability_rows(probabilities: Tensor) -> Tensor:
    """Return rows of probabilities in at least float32; `ShapeError` without a key."""
    if probabilities.ndim == 0 or probabilities.shape[-1] == 0:
        raise ShapeError(
            "expected (..., queries, keys) with at least one key, received"
            f" {tuple(probabilities.shape)}"
        )
    return probabilities.to(torch.promote_types(probabilities.dtype, torch.float32))
