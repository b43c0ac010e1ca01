"""Trained weights of 16 bits, whose small steps are rounded away."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def dtype_names(tensors: Iterable[Tensor]) -> str:
    """Return the names of the dtypes of ``tensors``, such as ``"bfloat16 and float32"``.

    >>> dtype_names([torch.ones(2), torch.ones(1).half()])
    'float32 and float16'
    """
    names = (str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
    return " and ".join(dict.fromkeys(names))


def lost_steps(parameters: Iterable[Tensor]) -> str:
    """Return which steps of trained 16-bit weights are lost; empty if there are no such weights.

    Status: exact for an optimizer that adds its step to the weight. A step is lost if it is below
    half of the spacing of numbers, which is at least ``eps / 2`` of an entry. Optimizers with a
    float32 copy, a compensation or stochastic rounding lose none.

    >>> lost_steps([torch.nn.Parameter(torch.ones(2).bfloat16())])
    '1 trained weight is bfloat16: steps below 1/512 of an entry are rounded away'
    """
    half = [part for part in parameters if part.requires_grad and part.dtype in HALF]
    if not half:
        return ""
    share = round(4 / max(torch.finfo(part.dtype).eps for part in half))
    count = "1 trained weight is" if len(half) == 1 else f"{len(half)} trained weights are"
    return f"{count} {dtype_names(half)}: steps below 1/{share} of an entry are rounded away"


def lost_steps_warning(call: str, parameters: Iterable[Tensor], optimizer: str) -> str:
    """Return a warning of ``call`` with what to do; empty if there are no trained 16-bit weights.

    >>> lost_steps_warning("constrain_", [torch.ones(2)], "AdamW")
    ''
    """
    lost = lost_steps(parameters)
    if not lost:
        return ""
    return (
        f"{call}: {lost}, unless {optimizer} keeps float32 copies or rounds stochastically; load the"
        " model with dtype=torch.float32, and compute in bfloat16 by autocast (Trainer: bf16=True)"
    )
