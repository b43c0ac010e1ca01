"""Copies of weights from before a step, which undo it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from wellposed.constrain._constrained import Constrained
from wellposed.linalg import is_sharded, read


class Copied(Protocol):
    """The parts of a `ConstrainedMatrix` that are read here."""

    before: Tensor | None

    @property
    def value(self) -> Tensor:
        """The matrix as it is."""
        ...


def copy_before(matrices: Sequence[Copied]) -> None:
    """Copy matrices of one shape to their `before`."""
    for matrix in matrices:
        if matrix.before is None or not are_alike(matrix.before, matrix.value):
            matrix.before = torch.empty_like(matrix.value)
    pairs = [(matrix.before, matrix.value) for matrix in matrices if matrix.before is not None]
    if len(pairs) == 1:  # a sharded one is alone
        pairs[0][0].copy_(pairs[0][1])
    elif pairs:
        before, values = zip(*pairs, strict=True)
        torch._foreach_copy_(before, values)


def copy_for_undo(weights: Sequence[Constrained]) -> None:
    """Copy what a step changes of weights that keep no copy of their own, until it ends.

    Cost: an allocation and a copy for each dtype and device, and the memory of these weights while
    a step runs.
    """
    parts_of = {weight: weight.stepped() for weight in weights}
    alike: dict[object, list[Tensor]] = {}
    for parts in parts_of.values():
        for part in parts:
            alike.setdefault((part.dtype, part.device), []).append(part)

    copies: dict[int, Tensor] = {}
    for parts in alike.values():
        sizes = [part.numel() for part in parts]
        pieces = parts[0].new_empty(sum(sizes)).split(sizes)  # one allocation
        shaped = [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
        torch._foreach_copy_(shaped, parts)
        copies.update(zip(map(id, parts), shaped, strict=True))

    # Only now are all copies complete.
    for weight, parts in parts_of.items():
        weight.spare = [copies[id(part)] for part in parts]
        weight.is_saved = True


def are_alike(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have one shape and device."""
    return (first.shape, first.device) == (second.shape, second.device)


def are_same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have equal entries, those of other processes included."""
    if is_sharded(first):
        return bool((read(first) == read(second)).all())
    return torch.equal(first, second)
