"""Lines about a new constraint: how far weights moved, and which matrices are left free."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from wellposed.constrain._handle import Constraint
from wellposed.constrain._options import Set
from wellposed.constrain._precision import half_warning
from wellposed.constrain._weight_slice import WeightSlice
from wellposed.errors import shortened
from wellposed.moves import say_moves
from wellposed.roles import is_table, spans_of, split_path

logger = logging.getLogger(__name__)


def announce(handle: Constraint, summary: str) -> None:
    """Log how far weights moved, and warn of half weights whose small steps are lost."""
    say_moves(logger, summary, handle.report.moved)
    warning = half_warning(handle.weights)
    if warning:
        logger.warning("%s", warning)


def print_moves(summary: str, moved: Mapping[str, float]) -> None:
    """Print how far each weight would move."""
    lines = [f"{path}: would move by {part:.2g}\n" for path, part in moved.items()]
    sys.stdout.writelines([f"{summary}\n", *lines] if moved else [])


def summarized(handle: Constraint, to: Set, model: nn.Module | None) -> str:
    """Return the line of the log; with the matrices of ``model`` that are not constrained."""
    summary = handle.report.summary(to) if handle.report.rows else ""
    if model is None:
        return summary
    slices = [part for weight in handle.weights for part in weight.slices]
    return f"{summary}: {_scope_of_default(model, slices)}"


def _scope_of_default(model: nn.Module, slices: Sequence[WeightSlice]) -> str:
    """Return which matrices are constrained by default, and the names of all others."""
    rows: dict[int, list[WeightSlice]] = {}
    for part in slices:
        rows.setdefault(id(part.parameter), []).append(part)
    layers = {split_path(part.module_path)[1] for part in slices}
    tables = {id(module.weight) for module in model.modules() if is_table(module)}

    inside: list[str] = []
    elsewhere: list[str] = []
    for name, parameter in model.named_parameters():
        free = (
            "" if parameter.ndim < 2 else _free_rows(name, parameter, rows.get(id(parameter), []))
        )
        if free:
            in_layer = any(f"{name}.".startswith(f"{path}.") for path in layers if path)
            in_root = "" in layers and id(parameter) not in tables
            (inside if in_layer or in_root else elsewhere).append(free)

    others = shortened(elsewhere) or "no others"
    if not inside:
        return f"every matrix of the layers; unconstrained: {others}"
    covered = "the matrices of the layers that play a role"
    return f"{covered}; unconstrained inside the layers: {shortened(inside)}; elsewhere: {others}"


def _free_rows(name: str, parameter: torch.Tensor, slices: Sequence[WeightSlice]) -> str:
    """Return the name of a parameter, with the rows that no place covers; empty if all are covered."""
    if not slices:
        return name
    if any(part.rows is None for part in slices):
        return ""
    count = parameter.shape[-1 if slices[0].transposed else -2]
    covered = {row for part in slices for row in part.rows or ()}
    left = spans_of(row for row in range(count) if row not in covered)
    return f"{name}[{', '.join(f'{a}:{b}' for a, b in left)}]" if left else ""
