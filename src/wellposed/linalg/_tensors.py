"""Plain tensors and DTensors (FSDP2, tensor parallel) read and written by the same functions, and the
precision of products."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor


@contextlib.contextmanager
def full_precision(device_type: str = "cpu") -> Iterator[None]:
    """Run float32 matrix products in float32: no TF32, no bfloat16 shortcut, no autocast (Gram
    errors of 1e-3).

    Covers `torch.set_float32_matmul_precision`, `torch.backends.fp32_precision` and those of cuda
    and mkldnn (also inherited), `allow_tf32` and autocast. On leaving, by an exception too, each is
    as it was. Per process, not thread.
    """
    mkldnn: Any = torch.backends.mkldnn
    backends = (torch.backends.cuda.matmul, mkldnn.matmul)
    reduced = [(backend, backend.fp32_precision) for backend in backends]
    reduced = [(backend, value) for backend, value in reduced if value not in ("none", "ieee")]
    try:
        for backend, _ in reduced:
            backend.fp32_precision = "ieee"
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        for backend, value in reduced:
            # A setting inherited from a wider one must go on following it.
            backend.fp32_precision = "none"
            if backend.fp32_precision != value:
                backend.fp32_precision = value


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return float64 for float64 tensors and float32 for every other floating dtype."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def tall(matrix: Tensor) -> Tensor:
    """Return the matrix, transposed (a view) when it has more columns than rows."""
    return matrix if matrix.shape[-2] >= matrix.shape[-1] else matrix.mT


def is_sharded(tensor: Tensor) -> TypeGuard[Any]:
    """Whether the tensor is a DTensor; none can exist before ``torch.distributed.tensor`` is
    imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def gathered(tensor: Tensor) -> Tensor:
    """Return the whole tensor: itself, or the shards gathered (one all-gather, on every rank)."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def read(tensor: Tensor) -> Tensor:
    """Return the whole tensor, detached."""
    return gathered(tensor.detach())


def write_(target: Tensor, value: Tensor) -> None:
    """Copy a whole matrix into ``target``; of a DTensor each rank fills its own shard, without
    communication."""
    plain = target.detach()
    plain.copy_(cut_like(plain, value.to(plain.dtype)))


def cut_like(target: Tensor, value: Tensor) -> Tensor:
    """Return the whole ``value`` cut as ``target`` is, without communication; itself where
    ``target`` is whole."""
    if not is_sharded(target):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    mesh = target.device_mesh
    whole = DTensor.from_local(
        value.to(target.device), mesh, [Replicate()] * mesh.ndim, run_check=False
    )
    return whole.redistribute(placements=target.placements)


def mean_over_ranks(value: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Return ``value``, computed alike by every rank from sharded ``weights``, with the gradient of
    the mean loss.

    FSDP2 averages the gradients of the losses of its ranks. What reads shards directly takes no
    part in that: without this each shard would follow the loss of its own rank. One scalar
    all-reduce in the backward pass.
    """
    mesh = next((weight.device_mesh for weight in weights if is_sharded(weight)), None)
    return value if mesh is None else _MeanOverRanks.apply(value, mesh)  # type: ignore[return-value]


class _MeanOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, mesh: Any) -> Tensor:
        ctx.mesh = mesh
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = grad.clone()
        for dimension in range(ctx.mesh.ndim):
            torch.distributed.all_reduce(total, group=ctx.mesh.get_group(dimension))
        return total / ctx.mesh.size(), None
