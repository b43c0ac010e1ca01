"""Cuts parameters that are fused of several roles, heads or experts into a matrix for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from torch import nn

from wellposed.constrain._weight_slice import WeightSlice, all_candidates
from wellposed.errors import WellposedError
from wellposed.roles import Roles, RoleWeight, block_of, spans_of

Per: TypeAlias = Literal["head"] | None


def candidates_with_roles(
    model: nn.Module, model_roles: Roles | WellposedError, per: Per
) -> list[WeightSlice]:
    """Return all matrices of the model, and parts of those that are fused of several roles."""
    weights: dict[tuple[int, str], list[RoleWeight]] = {}
    for weight in model_roles.weights() if isinstance(model_roles, Roles) else ():
        weights.setdefault((id(weight.view.owner), weight.view.attribute), []).append(weight)
    candidates: list[WeightSlice] = []
    for part in all_candidates(model):
        candidates += _parts(part, weights.get((id(part.module), part.name), []), per=per)
    return candidates


def _parts(
    weight_slice: WeightSlice, weights: Sequence[RoleWeight], *, per: Per
) -> list[WeightSlice]:
    """Return the matrices of a parameter by role, by head (``per``) and by expert of a stack."""
    around = (weight.view.deviation for weight in weights)
    matrix = replace(
        weight_slice,
        roles=frozenset(weight.role for weight in weights),
        deviation=next(filter(None, around), weight_slice.deviation),
    )
    parameter = weight_slice.parameter
    entries = {weight.view.expert for weight in weights}
    if parameter is None or entries == {None}:
        return _blocks(matrix, weights, per=per)
    if parameter.ndim != 3 or entries != set(range(len(parameter))):
        return [matrix]

    return [
        part
        for expert in range(len(parameter))
        for part in _blocks(
            replace(matrix, expert=expert, transposed=weights[0].view.transposed),
            [weight for weight in weights if weight.view.expert == expert],
            per=per,
        )
    ]


def _blocks(matrix: WeightSlice, weights: Sequence[RoleWeight], *, per: Per) -> list[WeightSlice]:
    """Return the blocks of rows of one matrix, or the matrix if its roles are not blocks."""
    by_role = [(w.role, (per and w.heads) or (w.view.spans,)) for w in weights]
    pieces = [(spans, role) for role, several in by_role for spans in several]
    if not pieces or matrix.parameter is None or any(spans is None for spans, _ in pieces):
        return [replace(matrix, roles=frozenset(weight.role for weight in weights))]

    roles: dict[range | None, set[str]] = {}
    for spans, role in pieces:
        roles.setdefault(block_of(spans or ()), set()).add(role)

    blocks = [rows for rows in roles if rows is not None]
    if len(blocks) < len(roles):
        return [replace(matrix, scattered=True)]

    transposed = weights[0].view.transposed
    left = set(range(matrix.parameter.shape[-1 if transposed else -2]))
    for rows in blocks:
        if not left.issuperset(rows):
            return [matrix]
        left.difference_update(rows)

    free = [range(*span) for span in spans_of(sorted(left))]
    return [
        replace(matrix, rows=rows, transposed=transposed, roles=frozenset(roles.get(rows, ())))
        for rows in sorted([*blocks, *free], key=lambda rows: (rows.start, rows.step))
    ]
