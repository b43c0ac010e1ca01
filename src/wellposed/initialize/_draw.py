"""Draw the weights of a plan, in place, and undo it after an error."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from wellposed.initialize._plan import Step
from wellposed.initialize._report import InitializedWeight
from wellposed.interrupts import Undo


@torch.no_grad()
def carry_out(
    steps: Sequence[Step], undo: Undo, generator: torch.Generator | None = None
) -> list[InitializedWeight]:
    """Draw and scale every weight, in place, and return one row for each; ``undo`` restores them."""
    rows: list[InitializedWeight] = []
    for step in steps:
        weight = step.view.tensor()
        padding = step.padding_index
        original = before = after = _std(weight, padding)
        moved = None
        is_drawn = step.draw != "kept"
        if is_drawn:
            values = _drawn(step, weight, generator)
            before = _std(values, padding)
            values = values.mul_(step.factor).to(weight)
            after = _std(values, padding)
            # from_pretrained marks weights that came from a checkpoint.
            if getattr(step.view.parameter, "_is_hf_initialized", False):
                moved = float((values - weight).norm() / weight.norm())
            undo.later(_restore, weight, weight.clone())
            weight.copy_(values)
        row = InitializedWeight(
            name=step.view.parameter_name,
            role=step.role,
            stack=step.stack,
            layer=step.layer,
            shape=step.view.shape,
            factor=step.factor,
            drawn=is_drawn,
            std_found=original,
            std_before=before,
            std_after=after,
            moved=moved,
        )
        rows.append(row)
    return rows


@torch.no_grad()
def _restore(weight: Tensor, values: Tensor) -> None:
    weight.copy_(values)


def _drawn(step: Step, weight: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return fresh numbers (out, in) before the factor, in float32 at least."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    if step.values is not None:
        return step.values.to(weight.device, dtype)
    device = weight.device if generator is None else generator.device
    values = torch.empty(step.view.shape, dtype=dtype, device=device)
    if step.draw == "embedding":
        nn.init.normal_(values, std=1.0 / math.sqrt(values.shape[1]), generator=generator)
    else:
        getattr(nn.init, f"{step.draw}_")(values, generator=generator)
    if step.padding_index is not None:
        values[step.padding_index] = 0.0
    return values.to(weight.device)


def _std(weight: Tensor, padding_index: int | None) -> float:
    values = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    if padding_index is not None and values.shape[0] > 1:
        rows = torch.arange(values.shape[0], device=values.device)
        values = values[rows != padding_index % values.shape[0]]
    return values.std(correction=0).item()
