"""The optimizer of a run, in two groups: free matrices decay, everything else does not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from wellposed.constrain import MuonAndAdamW, decay_groups
from wellposed.linalg.sharded import is_sharded
from wellposed.training.config import TrainOptions

FUSED_DEVICES = ("cpu", "cuda")


def build_optimizer(
    model: nn.Module,
    options: TrainOptions,
    *,
    constrained: Iterable[nn.Parameter] = (),
    where: Sequence[str] = (),
) -> torch.optim.Optimizer:
    """Return the optimizer that ``options`` names over the trainable parameters of ``model``.

    Args:
        model: any module.
        options: rates and moments; AdamW and SGD run in one fused kernel where the device has it.
        constrained: weights without decay, which ``where`` names.

    Raises:
        ConfigError: Muon, of a model without hidden matrices.
    """
    device = next(model.parameters()).device.type
    adam: dict[str, Any] = {
        "betas": (options.adam_beta1, options.adam_beta2),
        "eps": options.adam_epsilon,
    }
    if options.optimizer == "muon":
        return MuonAndAdamW(
            model,
            lr=options.learning_rate,
            adamw_lr=options.learning_rate,
            momentum=0.95 if options.momentum is None else options.momentum,
            weight_decay=options.weight_decay,
            adjust_lr_fn="match_rms_adamw",
            where=list(where) or None,
            **adam,
        )
    groups = decay_groups(model, options.weight_decay, constrained=constrained)
    if options.optimizer == "sgd":
        momentum = 0.9 if options.momentum is None else options.momentum
        fused = device in FUSED_DEVICES and not any(
            map(is_sharded, model.parameters())
        )  # torch fuses no sharded SGD
        return torch.optim.SGD(groups, lr=options.learning_rate, momentum=momentum, fused=fused)
    return torch.optim.AdamW(
        groups, lr=options.learning_rate, fused=device in FUSED_DEVICES, **adam
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Give every group of ``optimizer`` the learning rate ``value``."""
    for group in optimizer.param_groups:
        group["lr"] = value
