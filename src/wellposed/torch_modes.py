"""Modes of torch that change how a call computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def in_ordinary_modes(call: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a call record gradients in the dtypes of its tensors, in any mode of the caller."""

    @functools.wraps(call)
    def ordinary(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(mode=False))
            stack.enter_context(torch.enable_grad())
            for device in filter(torch.is_autocast_enabled, ("cpu", "cuda", "mps", "xpu")):
                stack.enter_context(torch.autocast(device, enabled=False))
            return call(*args, **kwargs)

    return ordinary


def on_the_cpu(call: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make the new tensors of a call lie on the CPU, whatever default device the caller has set."""

    @functools.wraps(call)
    def on_cpu(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        # The context costs time at every operation, so it is entered only for another default.
        if torch.get_default_device().type == "cpu":
            return call(*args, **kwargs)
        with torch.device("cpu"):
            return call(*args, **kwargs)

    return on_cpu


def in_float64(value: float | Tensor) -> Tensor:
    """Return a number or a tensor in float64 on the CPU, never rounded to the default dtype."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", torch.float64)
    return torch.as_tensor(value, dtype=torch.float64, device="cpu")


def is_transformed() -> bool:
    """Return whether torch.func or forward-mode differentiation is active."""
    return not torch.compiler.is_compiling() and (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    )
