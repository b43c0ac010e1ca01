"""Logits that replaced words could reach, for training (theory note B14)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError
from wellposed.models import LOGIT_SCALE, WellposedForSequenceClassification
from wellposed.nn import BallAttention, BudgetResidual, ConvexResidual, MaxMinFeedForward


def word_logits(
    logits: Tensor,
    batch: Mapping[str, Tensor],
    model: Any,
    words: float,
    votes: Tensor | None = None,
) -> Tensor:
    """Return ``z_c + g_c / n``, where g_c sums the ``words`` largest gains of class c over the
    label.

    Status: an upper bound of what replaced words reach if weights have norm 1 at most (theory notes
    B14, B15), exact without blocks. Differentiable in embeddings, temperatures and shares of
    branches. For ``words=2.5`` the third gain counts half.

    Args:
        logits: (batch, classes), before any temperature.
        batch: With ``input_ids``, ``attention_mask`` and ``labels``.
        model: A classifier of the variant lipschitz; `ConfigError` otherwise.
        words: k >= 0.
        votes: (batch, windows, classes), 0 after a text, of a model of windows whose logits are a
            multiple of mean votes; these are raised instead.

    Cost: one embedding of the vocabulary, ``vocabulary x classes^2`` comparisons.
    """
    if words <= 0:
        return logits
    labels = batch["labels"]
    if votes is not None:
        gains = 1 + votes.gather(2, labels[:, None, None].expand(*votes.shape[:2], 1)) - votes
        moved = _most_moved(gains, votes.sum(2) > 0, words, labels)
        return logits + LOGIT_SCALE * moved

    model = getattr(model, "module", model)  # unwraps DistributedDataParallel
    ours = isinstance(model, WellposedForSequenceClassification)
    if not ours or model.config.pooling != "mean":
        problem = "margin_loss = words is for a classifier of texts of the variant lipschitz"
        raise ConfigError(f"{problem} that pools by the mean; received a {type(model).__name__}")

    classifier: Any = model.classifier
    body: Any = model.model
    ids = batch["input_ids"]
    mask = batch["attention_mask"].bool() if "attention_mask" in batch else torch.ones_like(ids) > 0
    table: Any = model.get_input_embeddings()
    vectors = table(torch.arange(table.num_embeddings, device=ids.device))
    skip, total = (body.embeddings.scale * factor for factor in _factors(body.layers, ids.shape[1]))
    along = skip * vectors @ classifier.weight.mT
    # best[y, c] = max_w s (w_c - w_y) . e_w
    best = (along[:, None, :] - along[:, :, None]).amax(0)
    current = nn.functional.embedding(ids, along)
    current = current - current.gather(2, labels[:, None, None].expand(-1, ids.shape[1], 1))
    gaps = classifier.weight[labels][:, None] - classifier.weight
    sizes = (gaps.square().sum(-1) + 1e-12).sqrt()
    lengths = vectors.norm(dim=-1)
    reach = nn.functional.embedding(ids, lengths[:, None]) + lengths.amax()
    gains = best[labels][:, None] - current + (total - skip) * sizes[:, None] * reach

    return logits + _most_moved(gains, mask, words, labels).to(logits.dtype)


def _most_moved(gains: Tensor, mask: Tensor, words: float, labels: Tensor) -> Tensor:
    """Return the sum of a text's ``words`` largest gains over its length, (batch, classes)."""
    gains = gains.masked_fill(~mask[..., None], 0.0)
    most = min(math.ceil(words), gains.shape[1])
    shares = (words - torch.arange(most, device=gains.device)).clamp(0, 1)
    moved = (gains.topk(most, dim=1).values * shares[:, None]).sum(1) / mask.sum(1)[:, None]
    return moved * torch.ones_like(moved).scatter(1, labels[:, None], 0.0)


def _factors(layers: nn.ModuleList, tokens: int) -> tuple[Tensor | float, Tensor | float]:
    """Return the share of a state that is its own token, and the constant in norm sum, of blocks."""
    skip: Tensor | float = 1.0
    total: Tensor | float = 1.0
    for layer in layers:
        for name in ("attention", "feedforward"):
            branch = getattr(layer, name)
            residual = getattr(layer, f"{name}_residual")
            is_bounded_residual = isinstance(residual, (ConvexResidual, BudgetResidual))
            if not (is_bounded_residual and isinstance(branch, (BallAttention, MaxMinFeedForward))):
                raise ConfigError(
                    "margin_loss = words is for blocks of the variant lipschitz; received"
                    f" {type(branch).__name__} in a {type(residual).__name__}"
                )
            weight, scale = residual.weights()
            identity = 1.0 if weight is None else weight
            constant: Tensor | float = 1.0
            if isinstance(branch, BallAttention):
                temperature, mix = branch.head_scales()
                grown = (2 * temperature).exp()
                column = tokens * grown / (tokens - 1 + grown)
                constant = (mix * (column * (1 + 2 * temperature) + temperature)).sum()
            total = total * (identity + scale * constant)
            skip = skip * identity

    return skip, total
