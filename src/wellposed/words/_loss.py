"""The logits that replaced words could reach, for training (theory note B14)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError
from wellposed.models import SHARPNESS, WellposedForSequenceClassification
from wellposed.nn import BallAttention, BudgetResidual, ConvexResidual, MaxMinFeedForward


def word_logits(
    logits: Tensor,
    batch: Mapping[str, Tensor],
    model: Any,
    words: float,
    votes: Tensor | None = None,
) -> Tensor:
    r"""Return ``z_c + g_c / n``, g_c the sum of the ``words`` largest gains that replacing a word of
    the text has for class c against the label.

    Status: an upper bound of what replaced words reach where weights have norm 1 at most, exact
    without blocks; with gradient, so that embeddings, temperatures and shares of branches pay for
    what they allow. The gain of a word v is ``max_w s (w_c - w_y) . (e_w - e_v)`` plus ``rest |w_c -
    w_y| (|e_v| + max |e_w|)``; of a part of a word the next gain counts by that part. Where windows
    vote, mean votes are raised in place of logits, a window by ``1 + v_y - v_c`` at most (B15).

    Args:
        logits: (batch, classes), before any temperature.
        batch: ``input_ids``, ``attention_mask`` and ``labels``.
        model: a classifier of the variant lipschitz.
        words: k >= 0.
        votes: (batch, windows, classes) of a model of windows, 0 behind the end of a text; its
            logits are a multiple of mean votes.

    Raises:
        ConfigError: another model.

    Cost: one embedding of the vocabulary, ``vocabulary x classes^2`` comparisons.
    """
    if words <= 0:
        return logits
    labels = batch["labels"]
    if votes is not None:
        gains = 1 + votes.gather(2, labels[:, None, None].expand(*votes.shape[:2], 1)) - votes
        moved = _most_moved(gains, votes.sum(2) > 0, words, labels)
        return logits + SHARPNESS * moved
    model = getattr(model, "module", model)  # of DistributedDataParallel
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
    own = nn.functional.embedding(ids, along)
    own = own - own.gather(2, labels[:, None, None].expand(-1, ids.shape[1], 1))
    gaps = classifier.weight[labels][:, None] - classifier.weight
    sizes = (gaps.square().sum(-1) + 1e-12).sqrt()
    lengths = vectors.norm(dim=-1)
    reach = nn.functional.embedding(ids, lengths[:, None]) + lengths.amax()
    gains = best[labels][:, None] - own + (total - skip) * sizes[:, None] * reach
    return logits + _most_moved(gains, mask, words, labels).to(logits.dtype)


def _most_moved(gains: Tensor, mask: Tensor, words: float, labels: Tensor) -> Tensor:
    """Return the mean over the real places of a text of its ``words`` largest gains, (batch,
    classes), 0 for the label."""
    gains = gains.masked_fill(~mask[..., None], 0.0)
    most = min(math.ceil(words), gains.shape[1])
    shares = (words - torch.arange(most, device=gains.device)).clamp(0, 1)
    moved = (gains.topk(most, dim=1).values * shares[:, None]).sum(1) / mask.sum(1)[:, None]
    return moved * torch.ones_like(moved).scatter(1, labels[:, None], 0.0)


def _factors(layers: nn.ModuleList, tokens: int) -> tuple[Tensor | float, Tensor | float]:
    """Return the share of a state that is its own token, and the constant in norm sum, of blocks
    whose weights have norm 1 at most."""
    skip: Tensor | float = 1.0
    total: Tensor | float = 1.0
    for layer in layers:
        for name in ("attention", "feedforward"):
            branch, residual = getattr(layer, name), getattr(layer, f"{name}_residual")
            known = isinstance(residual, (ConvexResidual, BudgetResidual))
            if not (known and isinstance(branch, (BallAttention, MaxMinFeedForward))):
                raise ConfigError(
                    "margin_loss = words is for blocks of the variant lipschitz; received"
                    f" {type(branch).__name__} in a {type(residual).__name__}"
                )
            own, scale = residual.weights()
            kept = 1.0 if own is None else own
            constant: Tensor | float = 1.0
            if isinstance(branch, BallAttention):
                temperature, mix = branch.head_scales()
                grown = (2 * temperature).exp()
                column = tokens * grown / (tokens - 1 + grown)
                constant = (mix * (column * (1 + 2 * temperature) + temperature)).sum()
            total = total * (kept + scale * constant)
            skip = skip * kept
    return skip, total
