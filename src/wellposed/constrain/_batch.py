"""Many weights of one shape as one batched product."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from wellposed.constrain._weight import Weight

# Entries of one stacked operand. A handful of copies of it stays in the cache of a CPU, and below
# about 400 MB in float32 on an accelerator.
_CPU_ENTRIES, _ENTRIES = 2**18, 2**24


def batches(weights: Iterable[Weight], *, batched: bool | None) -> list[list[Weight]]:
    """Group weights that one batched product can serve; ``None`` does so where their set gains from
    it."""
    groups: dict[object, list[Weight]] = {}
    for weight in weights:
        wanted = weight.gains_from_batch if batched is None else batched
        key = weight.batch_key if wanted else None
        groups.setdefault(id(weight) if key is None else (type(weight), key), []).append(weight)
    chunks: list[list[Weight]] = []
    for group in groups.values():
        first = group[0].parameter
        size = max(
            1, (_CPU_ENTRIES if first.device.type == "cpu" else _ENTRIES) // group[0].value.numel()
        )
        chunks.extend(group[start : start + size] for start in range(0, len(group), size))
    return chunks


def storage_key(weight: Weight) -> tuple[object, ...]:
    """What the entries of matrices must share to be stacked."""
    return tuple(weight.value.shape), weight.parameter.dtype, weight.parameter.device, weight.gain


def write_back_(weights: Sequence[Weight], values: Tensor) -> None:
    """Give each weight its matrix of a stack."""
    torch._foreach_copy_([weight.value for weight in weights], list(values.unbind()))
