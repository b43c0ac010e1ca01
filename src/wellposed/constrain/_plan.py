"""Costs of a handle's steps, from the shapes of its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import nn

from wellposed.constrain._batches import ENTRIES
from wellposed.constrain._matrix import ConstrainedMatrix
from wellposed.constrain._set import MatrixSet
from wellposed.constrain._shares import by_kind, rounds_of
from wellposed.constrain._start import start_weights
from wellposed.constrain._steps import MatrixConstraint
from wellposed.constrain._weight_slice import WeightSlice
from wellposed.plan import Meter, Plan, counted_kinds, model_flops_per_token, ranks_of

# Smaller side of the matrix on which a step is measured; costs grow with its cube.
_SIDE = 32


def planned(model: nn.Module, weights: Sequence[ConstrainedMatrix], to: str) -> Plan:
    """Return the plan of a handle; FLOPs and memory by a step of a small matrix outside its set."""
    ranks = ranks_of(weight.parameter for weight in weights)
    flops = [0] * ranks
    copies = [0] * ranks
    shares = [0] * ranks
    peak = 0
    spare = 0
    alike = Counter((weight.shape, weight.owner) for weight in weights)
    for weight in weights:
        cost, memory = _step(weight, *weight.shape)
        for rank in range(ranks) if weight.owner is None else [weight.owner]:
            flops[rank] += cost
            shares[rank] += 1
            copies[rank] += (
                (weight.is_square or weight.is_half) * weight.entries * weight.dtype.itemsize
            )
        if not (weight.is_square or weight.is_half):  # copied while a step runs
            parts = 1 if weight.owner is None else ranks
            spare += weight.entries * weight.parameter.itemsize // parts
        stacked = alike[weight.shape, weight.owner]
        peak = max(peak, memory * min(stacked, max(1, ENTRIES // weight.entries)))

    calls = 0
    sent = 0.0
    buffers = 0
    for pairs in by_kind(weights) if ranks > 1 else ():
        group = [matrix for matrix, _ in pairs]
        is_steered = group[0].set.is_steered
        shapes = [matrix.shape for matrix in group]
        sizes = [
            matrix.entries * matrix.parameter.itemsize if layout.holder is None else 0
            for matrix, layout in pairs
        ]
        # Before the step, values and gradients go to their owners, and gradients back.
        calls += len(rounds_of(shapes, ranks)) * (4 if is_steered else 2)
        sent += (5 if is_steered else 2) * sum(sizes) * (ranks - 1) / ranks**2
        for travel in rounds_of(shapes, ranks):
            part = sum(sizes[index] for index in travel) // ranks
            arrived = max(part, *(sizes[index] for index in travel))
            buffers = max(buffers, (1 + is_steered) * (part + 2 * arrived))

    roles = ("/".join(sorted(weight.slice.roles)) or "weight" for weight in weights)
    stored = ((weight.shape, weight.parameter.dtype) for weight in weights)
    kinds = counted_kinds((role, *kind) for role, kind in zip(roles, stored, strict=True))
    return Plan(
        f"constrain_ to {to}",
        matrices=kinds,
        flops_by_rank=tuple(flops),
        model_flops_per_token=model_flops_per_token(model),
        matrices_by_rank=tuple(shares),
        collectives={"all_to_all": calls} if calls else {},
        sent_bytes=round(sent),
        kept_bytes=max(copies),
        peak_bytes=peak + buffers + spare,
    )


def _step(weight: ConstrainedMatrix, rows: int, columns: int) -> tuple[int, int]:
    """Return FLOPs and memory of one matrix's step, scaled up from a small one."""
    factor = max(1.0, min(rows, columns) / _SIDE)
    is_part = rows == columns and not weight.is_square
    flops, memory = _small_step(
        replace(weight.set, size=1.0),
        rows=round(rows / factor),
        columns=round(columns / factor),
        is_part=is_part,
    )
    return round(flops * factor**3), round(memory * factor**2)


@cache
def _small_step(like: MatrixSet, rows: int, columns: int, *, is_part: bool) -> tuple[int, int]:
    """Measure the second step of a matrix, as accelerators take it."""
    noise = torch.arange(rows * columns, device="cpu").float().square().sin().view(rows, columns)
    layer = nn.Linear(columns, rows, bias=False, device="meta")
    layer.weight = nn.Parameter(noise.clone())
    part = WeightSlice("", "weight", layer, layer.weight, rows=range(rows) if is_part else None)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2)
    made = replace(type(like).for_weight(1.0, part), is_steered=like.is_steered)
    matrix = ConstrainedMatrix(part, optimizer, made)
    start_weights([matrix], dry_run=False)
    handle = MatrixConstraint(layer, [matrix], batched=True)
    handle.attach()
    meter = Meter()
    first = 0
    for _ in range(2):
        first = meter.flops
        # A rotation, and outwards, so that every singular value leaves the bound.
        layer.weight.grad = 0.1 * noise.flip(0) - layer.weight.detach()
        with meter:
            optimizer.step()

    return meter.flops - first, meter.peak_bytes
