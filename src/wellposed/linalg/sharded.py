"""Plain tensors and DTensors (FSDP2, tensor parallel) behind the same verbs: read all of it, write it back."""

from __future__ import annotations

import sys
from typing import Any, TypeGuard

from torch import Tensor


def is_sharded(tensor: Tensor) -> TypeGuard[Any]:
    """Whether the tensor is a DTensor; none can exist before ``torch.distributed.tensor`` is imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def gathered(tensor: Tensor) -> Tensor:
    """Return the whole tensor: itself, or the shards gathered (one all-gather, on every rank)."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def read(tensor: Tensor) -> Tensor:
    """Return the whole tensor, detached."""
    return gathered(tensor.detach())


def write_(target: Tensor, value: Tensor) -> None:
    """Copy a whole matrix into ``target``; of a DTensor each rank fills its own shard, without communication."""
    plain = target.detach()
    if is_sharded(plain):
        from torch.distributed.tensor import DTensor, Replicate

        mesh = plain.device_mesh
        whole = DTensor.from_local(value.to(plain.dtype), mesh, [Replicate()] * mesh.ndim, run_check=False)
        value = whole.redistribute(placements=plain.placements)
    plain.copy_(value)
