"""Moves weights into their sets when a constraint begins, in stacks of one shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from wellposed.constrain._wholes import Wholes
from wellposed.linalg import full_precision, in_stacks, is_sharded, mapped

# Entries of a stack; about eight copies in float64 exist at once. A CPU gains nothing from stacks
# of large matrices.
_CPU_ENTRIES = 2**20
_ENTRIES = 2**25


@dataclass(frozen=True)
class ConstrainedWeight:
    """One constrained weight: its place, its size, its distance to the set, how far it moved."""

    path: str
    """Full dotted name of the parameter."""
    shape: tuple[int, int]
    size: float
    """The size of the set: singular value, bound or length."""
    moved_frobenius: float
    """``|W' - W|_F / |W|_F``: 0 if the weight was in its set already."""
    error_before: float
    """Distance from the set before attaching, as `Constraint.error` measures it."""
    error_after: float
    """The same after attaching, in float64 on the weight as stored."""
    also: tuple[str, ...] = ()
    """Other names of the same tied parameter; it is constrained once."""


def start_weights(
    weights: Sequence[Any], *, dry_run: bool, undos: list[Callable[[], None]] | None = None
) -> tuple[ConstrainedWeight, ...]:
    """Move each `ConstrainedMatrix` into its set, unless it is there; return how far.

    What puts each matrix back is appended to ``undos`` before it moves, and keeps a copy of it.
    """

    def key(weight: Any) -> tuple[Any, ...]:
        parameter = weight.parameter
        return weight.set, weight.shape, parameter.dtype, parameter.device

    def size(weight: Any) -> int:
        room = _CPU_ENTRIES if weight.parameter.device.type == "cpu" else _ENTRIES
        return room // weight.entries

    chunks = [*in_stacks(weights, key, size)]
    is_on_cpu = all(
        weight.parameter.device.type == "cpu" and not is_sharded(weight.parameter)
        for weight in weights
    )
    with full_precision(*{weight.parameter.device.type for weight in weights}):
        start = partial(_start, dry_run=dry_run, undos=undos)
        parts = mapped(start, chunks, on_threads=is_on_cpu)
    rows = dict(zip(map(id, chain(*chunks)), chain(*parts), strict=True))
    return tuple(rows[id(weight)] for weight in weights)


@torch.no_grad()  # a thread has its own mode
def _start(
    chunk: Sequence[Any], *, dry_run: bool, undos: list[Callable[[], None]] | None
) -> list[ConstrainedWeight]:
    wholes = Wholes()
    stack = torch.stack([wholes.matrix(weight.parameter, weight.slice) for weight in chunk])
    nearest = chunk[0].set.nearest_stack(stack)
    inside = nearest.matrices
    length = torch.linalg.matrix_norm(stack, dtype=inside.dtype)
    change = torch.linalg.matrix_norm(inside - stack) / length
    moved = change.nan_to_num(nan=0.0, posinf=math.inf).tolist()  # nan: a zero matrix in its set

    rows: list[ConstrainedWeight] = []
    for index, weight in enumerate(chunk):
        is_moved = moved[index] > 0.0
        if nearest.sizes[index] != weight.set.size:
            weight.set = replace(weight.set, size=nearest.sizes[index])
        if is_moved and not dry_run:
            if undos is not None:
                undos.append(partial(_put_back, weight, weight.value.clone()))
            weight.write_whole(inside[index])
        if weight.is_half and not dry_run:
            weight.adopt_master(inside[index] if is_moved else weight.saved_master())

        row = ConstrainedWeight(
            weight.path,
            shape=(stack.shape[1], stack.shape[2]),
            size=nearest.sizes[index],
            moved_frobenius=moved[index],
            error_before=nearest.before[index],
            error_after=nearest.after[index],
            also=weight.slice.also,
        )
        rows.append(row)
    return rows


@torch.no_grad()
def _put_back(weight: Any, value: torch.Tensor) -> None:
    weight.value.copy_(value)
