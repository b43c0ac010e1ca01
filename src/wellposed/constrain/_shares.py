"""Sharded matrices (FSDP2, tensor parallel), each worked on by one rank of its mesh: the shards of
many travel to their owners in one buffer, and results travel back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from wellposed.constrain._matrix import ConstrainedMatrix
from wellposed.errors import ConvergenceError
from wellposed.linalg import Cut, Retraction, cost_of, cut_of, shares_of, wholes_of, write_shards_

# Entries that a rank has in one buffer; a matrix for every rank always travels at once.
_ROOM = 2**26

Matrices: TypeAlias = list[ConstrainedMatrix]
Outcome: TypeAlias = tuple[ConstrainedMatrix, Retraction | str]
"""What the retraction did to a matrix, or why it could not be done."""


def assign_owners(weights: Iterable[ConstrainedMatrix]) -> None:
    """Give each sharded matrix the rank of its mesh that works on it."""
    for pairs in by_kind(weights):
        costs = [cost_of(matrix.parameter.shape) for matrix, _ in pairs]
        owners = shares_of([cut for _, cut in pairs], costs)
        for (matrix, _), owner in zip(pairs, owners, strict=True):
            matrix.owner = owner


def prepare(ready: Matrices, work_on: Callable[[Matrices], object]) -> None:
    """Before a step: call ``work_on``, which calls `MatrixSet.state`, with the matrices of this rank."""
    work_on([matrix for matrix in ready if matrix.owner is None])
    for matrices, cuts, owners in _rounds(filter(_is_read_before, ready)):
        values = [matrix.parameter for matrix in matrices]
        gradients = [_gradient(m) for m in matrices] if matrices[0].set.is_steered else []
        times = 2 if gradients else 1
        arrived = wholes_of(values + gradients, cuts * times, owners * times)
        mine, count = [place for place in arrived if place < len(values)], len(values)
        wholes = {i: _follow(matrices[i], arrived[i], arrived.get(i + count)) for i in mine}
        if gradients:
            work_on([*wholes.values()])
            back = {place: cast(Tensor, whole.parameter.grad) for place, whole in wholes.items()}
            write_shards_(gradients, cuts, owners, back)


def finish(pending: Matrices, work_on: Callable[[Matrices], list[Outcome]]) -> list[Outcome]:
    """After a step: call ``work_on``, which retracts and settles, with the matrices of this rank.

    Every rank returns the same outcomes of sharded matrices in the same order; the reason of a failure
    is its owner's alone.
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
    for matrices, cuts, owners in _rounds(shared):
        values = [matrix.parameter for matrix in matrices]
        wholes: dict[int, ConstrainedMatrix] = {}
        for place, value in wholes_of(values, cuts, owners).items():
            matrix = matrices[place]
            whole = matrix.whole or _follow(matrix, value)  # in a step that was not prepared
            if _is_read_before(matrix):
                whole.remember(decayed=matrix.is_displaced)
            whole.is_displaced, whole.parameter.data = matrix.is_displaced, value
            wholes[place] = whole
        taken.update(work_on([*wholes.values()]))
        news = {place: whole.parameter.detach() for place, whole in wholes.items()}
        reports = [_report(taken[whole]) for whole in wholes.values()]
        numbers.append(write_shards_(values, cuts, owners, news, notes=reports, width=3))
        for whole in wholes.values():
            whole.parameter = nn.Parameter(whole.parameter.new_empty(0))
        order += matrices
    rows: list[list[float]] = torch.cat(numbers).view(-1, 3).tolist() if numbers else []
    for matrix, (code, size, drift) in zip(order, rows, strict=True):
        if code >= 0.0:
            matrix.settle(drift)
            outcomes.append((matrix, Retraction("exponential" if code else "", size, drift)))
        else:
            reason = f"rank {matrix.owner} of its mesh, which works on it, says why"
            outcomes.append((matrix, taken.get(matrix.whole, reason)))
    return outcomes


def _report(outcome: Retraction | str) -> tuple[float, float, float]:
    """Return what an owner tells of a matrix: -1 if it has no nearest one or whether the step was
    large, the size of the step, the drift."""
    if isinstance(outcome, str):
        return -1.0, 0.0, 0.0
    return float(outcome.method in ("exponential", "svd")), outcome.size, outcome.drift


def _rounds(
    matrices: Iterable[ConstrainedMatrix],
) -> Iterator[tuple[Matrices, list[Cut], list[int]]]:
    """Yield what travels in one buffer, by owners, how it is cut and the owners, in one order on all
    ranks."""
    for pairs in by_kind(matrices):
        for indices in rounds_of([m.parameter.shape for m, _ in pairs], pairs[0][1].ranks):
            some = [(cast(int, pairs[index][0].owner), *pairs[index]) for index in indices]
            some.sort(key=lambda each: each[0])
            yield [m for _, m, _ in some], [cut for *_, cut in some], [owner for owner, *_ in some]


def by_kind(weights: Iterable[ConstrainedMatrix]) -> Iterable[list[tuple[ConstrainedMatrix, Cut]]]:
    """Group what one dimension of a mesh cuts. Matrices that are whole, or cut in another way, are left
    out: every rank works on them."""
    groups: dict[tuple[Any, ...], list[tuple[ConstrainedMatrix, Cut]]] = {}
    for matrix in weights:
        tensor, cut = matrix.parameter, cut_of(matrix.parameter)
        if type(matrix) is ConstrainedMatrix and cut is not None and tensor.ndim == 2:
            key = cut.groups, tensor.dtype, matrix.set.is_steered
            groups.setdefault(key, []).append((matrix, cut))
    return groups.values()


def _is_read_before(matrix: ConstrainedMatrix) -> bool:
    """Whether the owner reads a matrix before the optimizer's step as well."""
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
    """Return a matrix as its owner works on it, plain and whole, after it has seen edits."""
    whole = matrix.whole or copy(matrix)
    whole.parameter = nn.Parameter(value)
    whole.parameter.grad = gradient
    try:
        if matrix.whole is None:
            whole.owner = whole.before = None
            whole.optimizer = cast(Any, SimpleNamespace(state={}))
            whole.forget()
        else:
            whole.claim()
    except ConvergenceError:  # the retraction raises for it, of which every rank hears
        whole.master = value.to(whole.dtype)
    if math.isfinite(matrix.drift):  # of a checkpoint
        whole.drift = matrix.drift
    matrix.whole, whole.set = whole, matrix.set
    return whole


def rounds_of(shapes: Sequence[Sequence[int]], ranks: int) -> list[list[int]]:
    """Return the matrices that travel in one buffer: one round, unless a rank would hold more than
    2^26 entries of it; a matrix for every rank travels at once whatever its size.

    >>> rounds_of([(8, 8), (4, 4), (4, 4)], 2)
    [[0, 1, 2]]
    """
    rounds: list[list[int]] = []
    order, filled = sorted(range(len(shapes)), key=lambda index: -cost_of(shapes[index])), 0
    for start in range(0, len(order), ranks):
        row = order[start : start + ranks]
        entries = sum(math.prod(shapes[index]) for index in row)
        filled += entries
        if not rounds or filled > _ROOM * ranks:
            rounds.append([])
            filled = entries
        rounds[-1] += row
    return rounds
