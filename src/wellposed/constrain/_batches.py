"""Groups of matrices for batched products."""

from __future__ import annotations

from collections.abc import Iterable

from wellposed.constrain._matrix import ConstrainedMatrix
from wellposed.linalg import in_stacks

# Entries of one stacked operand. Several copies of it fit in a CPU's cache, or in about 400 MB in
# float32 on an accelerator, and wherever `batched=True` asks for few launches.
_CPU_ENTRIES = 2**18
ENTRIES = 2**24


def batches_of(
    matrices: Iterable[ConstrainedMatrix], batched: bool | None
) -> list[list[ConstrainedMatrix]]:
    """Group matrices for batched products, if asked for or faster than a loop."""

    def key(matrix: ConstrainedMatrix) -> object:
        is_slow = matrix.parameter.device.type == "cpu" and matrix.entries > matrix.set.stacked
        key = matrix.batch_key if batched or (batched is None and not is_slow) else None
        return id(matrix) if key is None else key

    def size(matrix: ConstrainedMatrix) -> int:
        fits_caches = batched is None and matrix.parameter.device.type == "cpu"
        return (_CPU_ENTRIES if fits_caches else ENTRIES) // matrix.entries

    return [*in_stacks(matrices, key, size)]
