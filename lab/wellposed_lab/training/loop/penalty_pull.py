"""How far a penalty moves the weights in a run, beside their size."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn


def pulls_of(penalty: Tensor, model: nn.Module) -> dict[str, float]:
    """Return the norm of the penalty's own gradient of each weight that it reaches. The graph stays
    for the backward pass of the step.

    Cost: one backward pass of the penalty and one read from the device.
    """
    named = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if not penalty.requires_grad:
        return {}

    gradients = torch.autograd.grad(
        penalty, list(named.values()), retain_graph=True, allow_unused=True
    )
    norms = {
        name: gradient.norm()
        for name, gradient in zip(named, gradients, strict=True)
        if gradient is not None
    }
    values = torch.stack([norm.float().cpu() for norm in norms.values()]).tolist() if norms else []

    return dict(zip(norms, values, strict=True))


def penalty_moves(
    pulls: Mapping[str, float],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    summed_rate: float,
) -> float | None:
    """Return about how far the penalty alone moves the weights, as a part of their size.

    Status: an estimate of the order of magnitude: every step is counted with the largest gradient
    that was read (of the first and the last step), and the final second moments.

    Args:
        pulls: Norm of the penalty's gradient by weight.
        model: Has the weights.
        optimizer: AdamW, which divides a gradient by the root of its second moment, or SGD.
        summed_rate: The sum of the learning rates of all steps.

    Returns:
        ``sum of rates * |pull / scale| / |weights|``; None for other optimizers (a step of Muon has
        the same size whatever the gradient) and without pulls.
    """
    groups = {weight: group for group in optimizer.param_groups for weight in group["params"]}
    weights = dict(model.named_parameters())
    moved = size = 0.0
    for name, pull in pulls.items():
        weight = weights[name]
        scale = _scale(optimizer.state.get(weight, {}), groups.get(weight, {}))
        if scale is None:
            return None
        moved += (pull / scale) ** 2
        size += float(weight.detach().float().norm()) ** 2
    return summed_rate * math.sqrt(moved / size) if size else None


def _scale(state: Mapping[str, Tensor], group: Mapping[str, object]) -> float | None:
    """Return what an optimizer divides a gradient by, over all its steps with momentum."""
    if "exp_avg_sq" in state:
        _, beta = group["betas"]  # type: ignore[misc]
        steps = float(state["step"])
        corrected = state["exp_avg_sq"].float().mean() / (1 - beta**steps)
        return float(corrected.sqrt()) + float(group["eps"])  # type: ignore[arg-type]
    if group.get("nesterov") is not None and "ns_steps" not in group:  # SGD
        return 1.0 - float(group["momentum"])  # type: ignore[arg-type]
    return None
