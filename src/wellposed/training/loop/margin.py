"""Losses on certified logits: the other classes start ahead by what a perturbation could give
them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from wellposed.errors import ConfigError
from wellposed.tasks.kinds.objectives import IGNORED_LABEL

if TYPE_CHECKING:
    from wellposed.tasks.task import Kind


def rows_of(kind: Kind, labels: Tensor) -> Tensor:
    """Return the class of each row of logits, -100 where none counts: of a language model that of
    the next token.

    Raises:
        ConfigError: the second text of an encoder-decoder, which no certificate reaches.

    >>> import torch
    >>> rows_of("causal_lm", torch.tensor([[5, 3, -100]])).tolist()
    [[3, -100, -100]]
    """
    if kind == "seq2seq_lm":
        raise ConfigError(
            "margin_radius is for classifiers and language models, received an encoder-decoder,"
            " whose decoder has no certificate; leave margin_radius 0"
        )
    return (
        functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
        if kind == "causal_lm"
        else labels
    )


def certified_logits(logits: Tensor, rows: Tensor, model: nn.Module, radius: float) -> Tensor:
    r"""Return ``z_k + r |w_y - w_k|_2`` for the class y of each row, which y's own logit does not
    change.

    Status: exact. A model whose body is 1-Lipschitz moves ``z_k - z_y`` by at most ``|w_y - w_k|
    r`` when its input moves by r, so the cross entropy of these logits bounds that of every input
    within r from above (Lipschitz-margin training, Tsuzuku, Sato, Sugiyama 2018, algorithm 1, with
    the slope of each pair in place of ``sqrt(2) L``).

    Args:
        logits: ``(..., classes)``, before any temperature.
        rows: ``(...)`` class numbers, -100 where a row does not count; see `rows_of`.
        model: its last map is the linear layer ``classifier``, of pairs ``classifier.output``, of a
            language model ``lm_head``, whose weight has one row for each class.
        radius: r >= 0 in units of what enters the model, such as 0.1 of tokens of norm 1.

    Raises:
        ConfigError: the model has no such layer, or the labels are not one class for each row.

    Cost: O(c classes width) for the c classes that occur in ``rows``. When not to use: where the
    body's constant is not about 1, r means something else.
    """
    head = getattr(model, "classifier", getattr(model, "lm_head", None))
    head = getattr(head, "output", head)
    if not isinstance(head, nn.Linear) or rows.shape != logits.shape[:-1]:
        raise ConfigError(
            f"margin_radius = {radius:g} is for models that end in a linear layer, `classifier`,"
            f" `classifier.output` or `lm_head`; received a {type(model).__name__} with logits"
            f" {tuple(logits.shape)} and labels {tuple(rows.shape)}; leave margin_radius 0"
        )
    classes, place = rows.clamp_min(0).unique(return_inverse=True)
    # Not by products, whose rounding is that of the squares of the weights.
    gaps = torch.cdist(
        head.weight[classes], head.weight, compute_mode="donot_use_mm_for_euclid_dist"
    )
    return logits + radius * gaps[place].to(logits.dtype)


def hinge_sum(logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum over rows of ``max(0, max_k z_k - z_y)``, k other than the class y, and how
    many rows count.

    Status: exact. Of `certified_logits` a row counts 0 exactly where the certified radius is at
    least r: where ``z_y - z_k >= r |w_y - w_k|`` for every other class (hinge loss of a certified
    margin; Tsuzuku, Sato, Sugiyama 2018 for the margin, Anil, Lucas, Grosse 2019 for hinge losses
    of Lipschitz models).

    Args:
        logits: ``(..., classes)``. rows: ``(...)``, -100 where a row does not count.

    When not to use: on plain logits, where it says nothing of how far the right class is ahead.

    >>> import torch
    >>> hinge_sum(torch.tensor([[1.0, 0.5], [0.0, 2.0]]), torch.tensor([0, 0]))
    (tensor(2.), tensor(2))
    """
    counted = rows != IGNORED_LABEL
    right = rows.clamp_min(0)[..., None]
    behind = logits.scatter(-1, right, -math.inf).amax(-1) - logits.gather(-1, right)[..., 0]
    return (behind.relu() * counted).sum(), counted.sum()
