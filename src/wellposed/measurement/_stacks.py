"""Stack many small tensors into few large ones, so that a device is read seldom."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wellposed.linalg import in_stacks

ENTRIES = 2**25
"""Entries of a stack: 128 MB in float32."""


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors of one shape; a single tensor is not copied."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Join all entries in one vector on the device of the first."""
    parts = [tensor.reshape(-1).to(tensors[0].device) for tensor in tensors]
    return torch.cat(parts) if parts else torch.empty(0)


def transferred(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors in float64 on the CPU, all by one transfer."""
    parts = joined(tensors).cpu().double().split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def norms(tensors: Sequence[Tensor], wide: torch.dtype = torch.float32) -> list[Tensor]:
    """Return 2-norms by few launches, in ``wide`` at least: float64 is finite if the entries
    are."""
    lengths: dict[int, Tensor] = {}
    kinds = [(tensor.dtype, tensor.device) for tensor in tensors]
    for part in in_stacks(range(len(tensors)), lambda i: kinds[i], lambda _: ENTRIES):
        dtype, device = kinds[part[0]]
        chosen = torch.promote_types(dtype, torch.float32 if device.type == "mps" else wide)
        values = torch._foreach_norm([tensors[i] for i in part], dtype=chosen)
        lengths |= dict(zip(part, values, strict=True))
    return [lengths[index] for index in range(len(tensors))]
