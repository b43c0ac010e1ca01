"""Moments of an optimizer: whether they belong to steps in Lie coordinates, and how they restart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wellposed.linalg import is_sharded, read

LIE_MARK = "wellposed_lie_coordinates"
"""In the state of a square weight: the drift of its last step, which marks Lie coordinates."""
NOTE = "wellposed_"
"""How the names of all entries begin that a constraint keeps beside the moments."""
# Share of a moment up to which it may fail to be skew or symmetric: optimizers that round at random
# come to about 2^-8, and one free step under a momentum of 0.9 to about 0.1.
_ROUNDING = 0.03
# ASGD keeps an average of the weights beside its moments.
_AVERAGES = frozenset({"ax"})


def are_lie(state: dict[str, Any]) -> bool:
    """Return whether the state is marked and its square moments are skew or symmetric, as those of
    skew gradients are.

    A mark alone is no proof: free steps leave it where it is. Codes and tensors of other classes are
    trusted; the retraction takes the skew part of every step.
    """
    if LIE_MARK not in state:
        return False
    # In one order: sharded moments are gathered, and a loaded state has another in every process.
    for name, moment in sorted(state.items()):
        is_plain = type(moment) is Tensor or (isinstance(moment, Tensor) and is_sharded(moment))
        if name in _AVERAGES or not is_plain or not moment.is_floating_point():
            continue
        if moment.ndim != 2 or not 1 < moment.shape[0] == moment.shape[1]:
            continue
        whole = read(moment).double() if moment.device.type != "mps" else moment.float()
        mirrored, limit = whole.mT, _ROUNDING * whole.norm()
        if not bool(torch.minimum((whole + mirrored).norm(), (whole - mirrored).norm()) <= limit):
            return False
    return True


def have_stepped(state: dict[str, Any]) -> bool:
    """Return whether the moments are those of a step, not only allocated."""
    step = state.get("step")
    if isinstance(step, Tensor):
        return bool(step.sum() > 0)
    return not isinstance(step, (int, float)) or step > 0


def restart(optimizer: Optimizer, parameter: Tensor) -> None:
    """Set the moments of a parameter to zero, or drop the state of an optimizer that is not torch's."""
    # torch's optimizers start from zeros; others may hold codes or tables, which only they can
    # make.
    state = optimizer.state[parameter]
    if not type(optimizer).__module__.startswith("torch."):
        del optimizer.state[parameter]
        return
    for name, value in state.items():
        if name.startswith(NOTE):
            continue
        if isinstance(value, Tensor):
            value.fill_(name == "mu_product")  # NAdam multiplies up from 1
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            state[name] = type(value)(0)
