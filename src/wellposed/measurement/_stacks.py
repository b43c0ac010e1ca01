"""Many small tensors as few large ones, so that a device is asked seldom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
ENTRIES = 2**25
"""Entries of a stack: 128 MB in float32."""


def in_stacks(
    items: Sequence[Item], key: Callable[[Item], Hashable], entries: Callable[[Item], int]
) -> Iterator[list[Item]]:
    """Yield items of one key together, so many that they have at most `ENTRIES` entries; one at
    least."""
    groups: dict[Hashable, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    for group in groups.values():
        size = max(1, ENTRIES // max(1, entries(group[0])))
        yield from (group[start : start + size] for start in range(0, len(group), size))


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of one shape as one; a single tensor is not copied."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))


def transferred(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors in float64 on the CPU, all by one transfer."""
    if not tensors:
        return []
    device = tensors[0].device
    flat = torch.cat([each.reshape(-1).to(device) for each in tensors]).cpu().double()
    parts = flat.split([each.numel() for each in tensors])
    return [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]


def norms(tensors: Sequence[Tensor], wide: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the 2-norm of each tensor by few launches, computed in ``wide`` at least: in float64,
    which MPS lacks, it is finite if and only if the entries are."""
    found: dict[int, Tensor] = {}
    kinds = [(each.dtype, each.device) for each in tensors]
    for part in in_stacks(range(len(tensors)), lambda i: kinds[i], lambda _: 1):
        dtype, device = kinds[part[0]]
        chosen = torch.promote_types(dtype, torch.float32 if device.type == "mps" else wide)
        values = torch._foreach_norm([tensors[i] for i in part], dtype=chosen)
        found |= dict(zip(part, values, strict=True))
    return [found[place] for place in range(len(tensors))]
