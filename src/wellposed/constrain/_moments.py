"""Moments of an optimizer: whether they are in Lie coordinates, and how they restart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wellposed.constrain._trial import starts_with_state
from wellposed.linalg import is_sharded, read

LIE_MARK = "wellposed_lie_coordinates"
"""In the state of a square weight: the drift of its last step, which marks Lie coordinates."""
NOTE = "wellposed_"
"""Prefix of the names of all entries that a constraint keeps beside the moments."""
# Fraction of a moment that need not be skew or symmetric. Stochastic rounding needs about 2^-8; one
# free step under a momentum of 0.9 makes about 0.1.
_ROUNDING = 0.03
# ASGD keeps an average of the weights beside its moments.
_AVERAGES = frozenset({"ax"})


def are_lie(state: dict[str, Any]) -> bool:
    """Whether the state is marked and its square moments are skew or symmetric.

    A mark alone is no proof, as free steps keep it. Codes and tensors of other classes are trusted.
    """
    if LIE_MARK not in state:
        return False
    # Sorted, as all ranks must gather in one order, and the order of a loaded state differs.
    for name, moment in sorted(state.items()):
        is_plain = type(moment) is Tensor or (isinstance(moment, Tensor) and is_sharded(moment))
        if name in _AVERAGES or not is_plain or not moment.is_floating_point():
            continue
        if moment.ndim != 2 or not 1 < moment.shape[0] == moment.shape[1]:
            continue
        matrix = read(moment).double() if moment.device.type != "mps" else moment.float()
        mirrored = matrix.mT
        limit = _ROUNDING * matrix.norm()
        if not bool(torch.minimum((matrix + mirrored).norm(), (matrix - mirrored).norm()) <= limit):
            return False
    return True


def have_stepped(state: dict[str, Any]) -> bool:
    """Whether the moments are those of a step, not only allocated."""
    step = state.get("step")
    if step is None:
        # Some make a state at construction: zeros, or a copy of the weight.
        entries = [value for name, value in state.items() if not name.startswith(NOTE)]
        tensors = [value for value in entries if isinstance(value, Tensor) and value.numel() > 1]
        return not tensors or any(bool(read(value).count_nonzero() > 0) for value in tensors)
    if isinstance(step, Tensor):
        return bool(step.sum() > 0)
    return not isinstance(step, (int, float)) or step > 0


def _refill(state: dict[str, Any], parameter: Tensor) -> None:
    """Set floating moments of the parameter's shape to zero; the state itself cannot be made anew."""
    for name, value in state.items():
        is_moment = isinstance(value, Tensor) and value.is_floating_point()
        if is_moment and not name.startswith(NOTE) and value.shape == parameter.shape:
            value.zero_()


def restart(optimizer: Optimizer, parameter: Tensor) -> None:
    """Set the moments of a parameter to zero; drop the state if it is not torch's."""
    # torch's optimizers start from zeros; others may use codes or tables that only they can make.
    state = optimizer.state[parameter]
    if not type(optimizer).__module__.startswith("torch."):
        if starts_with_state(optimizer):
            _refill(state, parameter)
        else:
            del optimizer.state[parameter]
        return
    for name, value in state.items():
        if name.startswith(NOTE):
            continue
        if isinstance(value, Tensor):
            value.fill_(name == "mu_product")  # NAdam multiplies from 1
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            state[name] = type(value)(0)


def restart_stepped(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Restart the moments of a parameter if they are those of a step; return whether they were."""
    stale = have_stepped(optimizer.state[parameter])
    if stale:
        restart(optimizer, parameter)
    return stale


def leave_lie_coordinates(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Restart moments in Lie coordinates and remove their mark; return whether a step made them."""
    if LIE_MARK not in optimizer.state.get(parameter, {}):
        return False
    stale = restart_stepped(optimizer, parameter)
    # Last, as it says that a restart is due.
    optimizer.state.get(parameter, {}).pop(LIE_MARK, None)
    return stale
