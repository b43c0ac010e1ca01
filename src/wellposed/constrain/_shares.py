"""Sharded matrices (FSDP2, tensor parallel): one rank of the mesh works on each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from wellposed.constrain._matrix import ConstrainedMatrix
from wellposed.errors import ConvergenceError
from wellposed.linalg import Layout, Retraction, cost_of, shares_of, wholes_of, write_shards_

# Entries of a rank in one buffer; one matrix for every rank is always sent together.
_ROOM = 2**26

Matrices: TypeAlias = list[ConstrainedMatrix]
Outcome: TypeAlias = tuple[ConstrainedMatrix, Retraction | str]
"""A matrix, and its retraction or the reason of its failure."""


def assign_owners(weights: Iterable[ConstrainedMatrix]) -> None:
    """Assign to each sharded matrix the rank that works on it."""
    for pairs in by_kind(weights):
        costs = [cost_of(matrix.shape) for matrix, _ in pairs]
        owners = shares_of([layout for _, layout in pairs], costs)
        for (matrix, _), owner in zip(pairs, owners, strict=True):
            matrix.owner = owner


def prepare(ready: Matrices, work_on: Callable[[Matrices], object]) -> None:
    """Before a step: call ``work_on``, which calls `MatrixSet.state`, on this rank's matrices."""
    work_on([matrix for matrix in ready if matrix.owner is None])
    for matrices, layouts, owners in _rounds(filter(_is_read_before, ready)):
        values = [matrix.parameter for matrix in matrices]
        gradients = [_gradient(m) for m in matrices] if matrices[0].set.is_steered else []
        times = 2 if gradients else 1
        arrived = wholes_of(values + gradients, layouts * times, owners * times)
        mine = [index for index in arrived if index < len(values)]
        count = len(values)
        wholes = {i: _follow(matrices[i], arrived[i], arrived.get(i + count)) for i in mine}
        if gradients:
            work_on([*wholes.values()])
            back = {index: cast(Tensor, matrix.parameter.grad) for index, matrix in wholes.items()}
            write_shards_(gradients, layouts, owners, back)


def finish(pending: Matrices, work_on: Callable[[Matrices], list[Outcome]]) -> list[Outcome]:
    """After a step: call ``work_on``, which retracts and settles, on this rank's matrices.

    Every rank returns the same outcomes of sharded matrices in the same order; only the owner has
    the reason of a failure.
    """
    outcomes = work_on([matrix for matrix in pending if matrix.owner is None])
    shared = [matrix for matrix in pending if matrix.owner is not None]
    for matrix in shared:
        if matrix.is_displaced and matrix.before is not None and not _is_read_before(matrix):
            matrix.value.add_(matrix.before)
            matrix.is_displaced = False

    taken: dict[ConstrainedMatrix | None, Retraction | str] = {}
    order: Matrices = []
    numbers: list[Tensor] = []
    for matrices, layouts, owners in _rounds(shared):
        values = [matrix.parameter for matrix in matrices]
        wholes: dict[int, ConstrainedMatrix] = {}
        for index, value in wholes_of(values, layouts, owners).items():
            matrix = matrices[index]
            gathered = matrix.gathered or _follow(matrix, value)  # the step was not prepared
            if _is_read_before(matrix):
                gathered.remember(decayed=matrix.is_displaced)
            gathered.is_displaced = matrix.is_displaced
            gathered.parameter.data = value
            wholes[index] = gathered
        taken.update(work_on([*wholes.values()]))
        news = {index: gathered.parameter.detach() for index, gathered in wholes.items()}
        reports = [_report(taken[gathered]) for gathered in wholes.values()]
        numbers.append(write_shards_(values, layouts, owners, news, notes=reports, width=3))
        for gathered in wholes.values():
            gathered.parameter = nn.Parameter(gathered.parameter.new_empty(0))
        order += matrices

    # (3 matrices,) -> (matrices, 3): code, size, drift
    rows: list[list[float]] = torch.cat(numbers).view(-1, 3).tolist() if numbers else []
    for matrix, (code, size, drift) in zip(order, rows, strict=True):
        if code >= 0.0:
            matrix.is_in_step = False
            matrix.settle(drift)
            outcomes.append((matrix, Retraction("exponential" if code else "", size, drift)))
        else:
            reason = f"rank {matrix.owner} of its mesh, which works on it, says why"
            outcomes.append((matrix, taken.get(matrix.gathered, reason)))

    return outcomes


def _report(outcome: Retraction | str) -> tuple[float, float, float]:
    """Return a matrix's outcome as numbers: -1 on failure or whether large; size; drift."""
    if isinstance(outcome, str):
        return -1.0, 0.0, 0.0
    return float(outcome.method in ("exponential", "svd")), outcome.size, outcome.drift


def _rounds(
    matrices: Iterable[ConstrainedMatrix],
) -> Iterator[tuple[Matrices, list[Layout], list[int]]]:
    """Yield matrices of one buffer with layouts and owners, in one order on all ranks."""
    for pairs in by_kind(matrices):
        for indices in rounds_of([m.shape for m, _ in pairs], pairs[0][1].cut.ranks):
            some = [(cast(int, pairs[index][0].owner), *pairs[index]) for index in indices]
            some.sort(key=lambda row: row[0])
            yield (
                [m for _, m, _ in some],
                [layout for *_, layout in some],
                [owner for owner, *_ in some],
            )


def by_kind(
    weights: Iterable[ConstrainedMatrix],
) -> Iterable[list[tuple[ConstrainedMatrix, Layout]]]:
    """Group matrices by cut; every rank works on those that are whole or cut in another way."""
    groups: dict[tuple[Any, ...], list[tuple[ConstrainedMatrix, Layout]]] = {}
    for matrix in weights:
        layout = matrix.layout
        if type(matrix) is ConstrainedMatrix and layout is not None:
            key = layout.cut.groups, matrix.parameter.dtype, matrix.set.is_steered
            groups.setdefault(key, []).append((matrix, layout))
    return groups.values()


def _is_read_before(matrix: ConstrainedMatrix) -> bool:
    """Whether the owner also reads a matrix before the optimizer's step."""
    return matrix.owner is not None and (matrix.set.is_steered or matrix.is_half)


def _gradient(matrix: ConstrainedMatrix) -> Any:
    """Return the gradient, cut as the parameter is."""
    parameter: Any = matrix.parameter
    if parameter.grad.placements != parameter.placements:
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    return parameter.grad


def _follow(
    matrix: ConstrainedMatrix, value: Tensor, gradient: Tensor | None = None
) -> ConstrainedMatrix:
    """Return a matrix, plain and whole, as its owner works on it after edits."""
    gathered = matrix.gathered or copy(matrix)
    gathered.layout = None
    gathered.is_sharded = False
    gathered.slice = replace(matrix.slice, expert=None, rows=None)
    gathered.parameter = nn.Parameter(value)
    gathered.parameter.grad = gradient

    try:
        if matrix.gathered is None:
            gathered.owner = gathered.before = None
            gathered.optimizer = cast(Any, SimpleNamespace(state={}))
            gathered.forget()
        else:
            gathered.claim()
    except ConvergenceError:  # the retraction raises it later, on every rank
        gathered.master = value.to(gathered.dtype)

    if math.isfinite(matrix.drift):  # of a checkpoint
        gathered.drift = matrix.drift
    matrix.gathered = gathered
    gathered.set = matrix.set
    return gathered


def rounds_of(shapes: Sequence[Sequence[int]], ranks: int) -> list[list[int]]:
    """Return the matrices of each buffer: at most 2^26 entries a rank, or one matrix a rank.

    >>> rounds_of([(8, 8), (4, 4), (4, 4)], 2)
    [[0, 1, 2]]
    """
    rounds: list[list[int]] = []
    order = sorted(range(len(shapes)), key=lambda index: -cost_of(shapes[index]))
    filled = 0
    for start in range(0, len(order), ranks):
        row = order[start : start + ranks]
        entries = sum(math.prod(shapes[index]) for index in row)
        filled += entries
        if not rounds or filled > _ROOM * ranks:
            rounds.append([])
            filled = entries
        rounds[-1] += row
    return rounds
