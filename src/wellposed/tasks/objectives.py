"""Losses and metrics as (sum, count) pairs: totals do not depend on batching or padding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

IGNORED_LABEL = -100
"""Label of a position that nothing is predicted at."""
TARGETS = ("labels", "label_bytes")
"""What of a batch losses and metrics read, and the model does not."""

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


def cross_entropy_sum(
    logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Sum over predictions of ``(1 - s) (-log p[y]) + s mean_c (-log p[c])``, and how many there
    are, in float32.

    Status: exact. ``s`` is the label smoothing of Szegedy et al. 2016, in [0, 1). Logits are (...,
    classes) of any float dtype, labels (...) integers, -100 where nothing is predicted; the sum, in
    nats, carries gradient.

    >>> import torch
    >>> total, count = cross_entropy_sum(torch.zeros(2, 4), torch.tensor([1, -100]))
    >>> round(float(total), 4), float(count)
    (1.3863, 1.0)
    """
    import torch

    flat = logits.reshape(-1, logits.shape[-1]).float()
    targets = labels.reshape(-1)
    total = torch.nn.functional.cross_entropy(
        flat, targets, reduction="sum", ignore_index=IGNORED_LABEL, label_smoothing=label_smoothing
    )
    return total, (targets != IGNORED_LABEL).sum().float()


def causal_cross_entropy_sum(
    logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Sum of the cross entropy of token t + 1 given tokens 0..t: ``logits[:, t]`` predicts
    ``labels[:, t + 1]``.

    As `cross_entropy_sum`, with logits (batch, tokens, classes) and unshifted labels (batch,
    tokens), -100 on padding.

    >>> import torch
    >>> total, count = causal_cross_entropy_sum(torch.zeros(1, 3, 4), torch.tensor([[1, 2, -100]]))
    >>> round(float(total), 4), float(count)
    (1.3863, 1.0)
    """
    return cross_entropy_sum(logits[:, :-1], labels[:, 1:], label_smoothing=label_smoothing)


def accuracy_sums(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return how many rows have their largest logit on the label, and how many rows there are.

    >>> import torch
    >>> accuracy_sums(torch.tensor([[0.0, 1.0], [2.0, 1.0]]), torch.tensor([1, 1]))
    (1.0, 2.0)
    """
    return float((logits.argmax(-1) == labels).sum()), float(labels.numel())


def frequency_entropy(ids: NDArray[np.integer]) -> float:
    """Return the entropy in nats of the frequencies of ``ids``: the least loss of a guess that
    ignores the input."""
    import numpy as np

    counts = np.bincount(ids)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def perplexity(nats: float) -> float:
    """Return e^nats, infinite where that is too large for a float."""
    return math.exp(nats) if nats < 709 else math.inf
