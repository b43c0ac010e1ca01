"""AdamW in two groups: free matrices decay, everything else does not."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from wellposed.training.config import TrainOptions

FUSED_DEVICES = ("cpu", "cuda")


def decay_groups(
    model: nn.Module, weight_decay: float, *, constrained: Iterable[nn.Parameter] = ()
) -> list[dict[str, object]]:
    """Return AdamW groups: trainable tensors with two or more axes decay; biases, norms and scalars do not.

    Nor do ``constrained`` weights, whose size is given: shrinking an orthogonal matrix means nothing.
    """
    kept_in_size = set(map(id, constrained))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trainable if parameter.ndim >= 2 and id(parameter) not in kept_in_size]
    others = [parameter for parameter in trainable if parameter.ndim < 2 or id(parameter) in kept_in_size]
    groups: list[dict[str, object]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


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
