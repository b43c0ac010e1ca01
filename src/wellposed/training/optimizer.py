"""AdamW in two groups: free matrices decay, everything else does not."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from wellposed.constrain import decay_groups
from wellposed.training.config import TrainOptions

FUSED_DEVICES = ("cpu", "cuda")


def build_optimizer(
    model: nn.Module, options: TrainOptions, *, constrained: Iterable[nn.Parameter] = ()
) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters of ``model``, in one fused kernel where the device has it."""
    device = next(model.parameters()).device.type
    return torch.optim.AdamW(
        decay_groups(model, options.weight_decay, constrained=constrained),
        lr=options.learning_rate,
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_epsilon,
        fused=device in FUSED_DEVICES,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Give every group of ``optimizer`` the learning rate ``value``."""
    for group in optimizer.param_groups:
        group["lr"] = value
