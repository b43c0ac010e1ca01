"""Many small tensors as few large ones, so that a device is asked seldom."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wellposed.linalg import in_stacks

ENTRIES = 2**25
"""Entries of a stack: 128 MB in float32."""


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of one shape as one; a single tensor is not copied."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return all entries in one vector on the device of the first."""
    parts = [each.reshape(-1).to(tensors[0].device) for each in tensors]
    return torch.cat(parts) if parts else torch.empty(0)


def transferred(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors in float64 on the CPU, all by one transfer."""
    parts = joined(tensors).cpu().double().split([each.numel() for each in tensors])
    return [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]


def norms(tensors: Sequence[Tensor], wide: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the 2-norm of each tensor by few launches, computed in ``wide`` at least: in float64,
    which MPS lacks, it is finite if and only if the entries are."""
    found: dict[int, Tensor] = {}
    kinds = [(each.dtype, each.device) for each in tensors]
    for part in in_stacks(range(len(tensors)), lambda i: kinds[i], lambda _: ENTRIES):
        dtype, device = kinds[part[0]]
        chosen = torch.promote_types(dtype, torch.float32 if device.type == "mps" else wide)
        values = torch._foreach_norm([tensors[i] for i in part], dtype=chosen)
        found |= dict(zip(part, values, strict=True))
    return [found[place] for place in range(len(tensors))]
