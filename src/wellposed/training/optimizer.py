"""AdamW in two groups: free matrices decay, everything else does not; or Muon beside it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from wellposed.constrain import MuonAndAdamW, decay_groups
from wellposed.training.config import TrainOptions

FUSED_DEVICES = ("cpu", "cuda")


def build_optimizer(
    model: nn.Module, options: TrainOptions, *, constrained: Iterable[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """Return the optimizer of ``options``; AdamW in one fused kernel where the device has it."""
    if options.optimizer == "muon":
        held = set(map(id, constrained))
        return MuonAndAdamW(
            model,
            lr=options.learning_rate,
            adamw_lr=options.learning_rate,
            betas=(options.adam_beta1, options.adam_beta2),
            eps=options.adam_epsilon,
            weight_decay=options.weight_decay,
            adjust_lr_fn="match_rms_adamw",
            where=(lambda _, module: not held.isdisjoint(map(id, module.parameters(recurse=False)))) if held else None,
        )
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
