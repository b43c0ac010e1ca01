"""Entropy of softmax rows, and how strongly they react to a change of their logits."""

from __future__ import annotations

import torch
from torch import Tensor

from wellposed.errors import ShapeError


def attention_entropy(probabilities: Tensor) -> Tensor:
    """Return ``-sum_j p_j ln p_j`` of every row, in nats: 0 for one-hot, ``ln n`` for uniform over
    n keys.

    Status: exact to rounding of the computing dtype (at least float32); ``0 ln 0 = 0``.

    Args:
        probabilities: ``(..., queries, keys)``, rows not negative with sum 1.

    Returns:
        ``(..., queries)``.

    Raises:
        ShapeError: no key, or a scalar.

    Cost: one pass over the matrix. When not to use: on attention weights after dropout, whose rows
    do not sum to 1.

    >>> attention_entropy(torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]])).tolist()
    [1.3862943649291992, 0.0]
    """
    return torch.special.entr(_rows(probabilities)).sum(-1)


def softmax_sensitivity(probabilities: Tensor) -> Tensor:
    """Return ``p1 (1 - p1 + p2) >= |diag p - p p^T|_2``, the 2-norm of the softmax Jacobian; at
    most 1/2.

    Status: a proved upper bound of each row's Jacobian (theory note B10), up to rounding; equality if and only if all
    other non-zero probabilities equal the second largest, ``p2``. ``1 - p1`` is summed from the
    other entries: as a difference it would lose the bound where p1 is near 1. A diagnostic at this
    input, no certificate around it.

    Args:
        probabilities: ``(..., queries, keys)``, rows not negative with sum 1.

    Returns:
        ``(..., queries)``, in 0..1/2: near 0 where the row is saturated (no gradient reaches the
        logits) or spread over many keys, 1/2 where two keys share it.

    Raises:
        ShapeError: no key, or a scalar.

    Cost: two passes over the matrix.

    >>> softmax_sensitivity(torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])).tolist()
    [0.5, 0.0]
    """
    rows = _rows(probabilities)
    first, place = rows.max(-1, keepdim=True)
    others = rows.scatter(-1, place, 0.0)
    return first[..., 0] * (others.sum(-1) + others.amax(-1))


def _rows(probabilities: Tensor) -> Tensor:
    if probabilities.ndim == 0 or probabilities.shape[-1] == 0:
        raise ShapeError(
            "expected (..., queries, keys) with at least one key, received"
            f" {tuple(probabilities.shape)}"
        )
    return probabilities.to(torch.promote_types(probabilities.dtype, torch.float32))
