"""Losses on certified logits: the other classes start ahead by what a perturbation could give them."""

from __future__ import annotations

import math

from torch import Tensor, nn

from wellposed.errors import ConfigError


def certified_logits(logits: Tensor, labels: Tensor, model: nn.Module, radius: float) -> Tensor:
    r"""Return ``z_k + r |w_y - w_k|_2`` for the class y of each row, which y's own logit does not change.

    Status: exact. A model whose body is 1-Lipschitz moves ``z_k - z_y`` by at most ``|w_y - w_k| r`` when its input
    moves by r, so the cross entropy of these logits bounds that of every input within r from above (Lipschitz-margin
    training, Tsuzuku, Sato, Sugiyama 2018, algorithm 1, with the slope of each pair in place of ``sqrt(2) L``).

    Args:
        logits: ``(batch, classes)``, before any temperature.
        labels: ``(batch,)`` class numbers.
        model: its last map is the linear layer ``classifier``, or of pairs ``classifier.output``, whose weight has one
            row for each class.
        radius: r >= 0 in units of what enters the model, such as 0.1 of tokens of norm 1.

    Raises:
        ConfigError: the model has no such layer, or the labels are not one class for each row.

    Cost: O(classes^2 width). When not to use: where the body's constant is not about 1, r means something else.
    """
    head = getattr(model, "classifier", None)
    head = getattr(head, "output", head)
    if not isinstance(head, nn.Linear) or logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise ConfigError(
            f"margin_radius = {radius:g} is for classifiers that end in a linear layer, `classifier` or "
            f"`classifier.output`; received a {type(model).__name__} with logits {tuple(logits.shape)} and labels "
            f"{tuple(labels.shape)}; leave margin_radius 0"
        )
    gaps = (head.weight[labels][:, None] - head.weight).norm(dim=-1)
    return logits + radius * gaps.to(logits.dtype)


def hinge_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum over rows of ``max(0, max_k z_k - z_y)``, k other than the class y.

    Status: exact. Of `certified_logits` a row counts 0 exactly where the certified radius is at least r: where
    ``z_y - z_k >= r |w_y - w_k|`` for every other class (hinge loss of a certified margin; Tsuzuku, Sato, Sugiyama 2018
    for the margin, Anil, Lucas, Grosse 2019 for hinge losses of Lipschitz models).

    Args:
        logits: ``(batch, classes)``. labels: ``(batch,)``.

    When not to use: on plain logits, where it says nothing of how far the right class is ahead.

    >>> import torch
    >>> hinge_sum(torch.tensor([[1.0, 0.5], [0.0, 2.0]]), torch.tensor([0, 0]))
    tensor(2.)
    """
    right = labels[:, None]
    behind = logits.scatter(-1, right, -math.inf).amax(-1) - logits.gather(-1, right)[:, 0]
    return behind.relu().sum()
