"""Distances between the tokens of a sequence, layer by layer."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from wellposed.errors import unknown_name
from wellposed.measurement._states import States, checked_mask, read_states

DistanceMetric = Literal["euclidean", "cosine", "dot"]
METRICS = ("euclidean", "cosine", "dot")


def token_distances(
    states: States, *, metric: DistanceMetric = "euclidean", attention_mask: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return ``|x_i^l - x_j^l|`` for all tokens i, j of each sequence and every layer l.

    Status: exact to float64 rounding. Source: Sengupta et al. (2023), Figure 4 compares them over
    layers.

    Args:
        states: ``(x_0, ..., x_L)``, each (batch, tokens, width), or a model output with
        ``hidden_states``.
        metric: ``"euclidean"``; ``"cosine"``, the distance ``1 - cos``; ``"dot"``, the product
        ``x_i . x_j``.
        attention_mask: (batch, tokens), 1 for real tokens; the rest become NaN.

    Returns:
        L + 1 tensors (batch, tokens, tokens), float64.

    Raises:
        ConfigError: unknown metric, or no hidden states. ShapeError: states or mask do not fit.

    Cost: ``(L + 1) batch tokens^2 width``, and as much memory without the width: for a few
    sequences, to look at. For a mean over a corpus use `activation_factor`, which holds one block
    of one sequence at a time.

    >>> still, moved = token_distances([torch.tensor([[[0.0], [1.0]]]), torch.tensor([[[0.0], [3.0]]])])
    >>> moved[0].tolist()
    [[0.0, 3.0], [3.0, 0.0]]
    """
    check_metric(metric)
    found = read_states(states)
    real = checked_mask(attention_mask, found[0])
    both = real.unsqueeze(1) & real.unsqueeze(2)
    wide = torch.float32 if real.device.type == "mps" else torch.float64
    return tuple(
        torch.stack([between(item, item, metric) for item in state.to(wide)]).masked_fill(
            ~both, torch.nan
        )
        for state in found
    )


def check_metric(metric: str) -> None:
    """Raise `ConfigError` for a metric that does not exist."""
    if metric not in METRICS:
        raise unknown_name("metric", str(metric), METRICS)


def between(first: Tensor, second: Tensor, metric: DistanceMetric) -> Tensor:
    """Return the (n, m) distances of the rows of two matrices."""
    if metric == "dot":
        return first @ second.mT
    # Differences, not products of norms: near tokens keep their digits, equal ones are exactly 0.
    exact = "donot_use_mm_for_euclid_dist"
    if metric == "euclidean":
        return torch.cdist(first, second, compute_mode=exact)
    return (
        torch.cdist(_unit(first), _unit(second), compute_mode=exact).square() / 2
    )  # 1 - u.v = |u - v|^2 / 2


def paired(first: Tensor, second: Tensor, metric: DistanceMetric) -> Tensor:
    """Return the distance of each row of one matrix to the same row of another."""
    if metric == "dot":
        return (first * second).sum(-1)
    if metric == "euclidean":
        return torch.linalg.vector_norm(first - second, dim=-1)
    return (_unit(first) - _unit(second)).square().sum(-1) / 2


def _unit(rows: Tensor) -> Tensor:
    return rows / torch.linalg.vector_norm(
        rows, dim=-1, keepdim=True
    )  # NaN for a zero vector, which has no angle
