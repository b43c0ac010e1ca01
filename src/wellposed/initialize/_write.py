"""Carry out a plan: draw, scale, and note the sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from wellposed.initialize._plan import Step
from wellposed.initialize._report import InitializedWeight


@torch.no_grad()
def write(
    steps: Sequence[Step], generator: torch.Generator | None = None
) -> list[InitializedWeight]:
    """Draw and scale every weight, in place, and return one row for each."""
    return [_write_one(step, generator) for step in steps]


def _write_one(step: Step, generator: torch.Generator | None) -> InitializedWeight:
    weight = step.view.tensor()
    found = before = after = _std(weight, step.padding_index)
    if step.draw != "kept":
        values = _drawn(step, weight, generator)
        before = _std(values, step.padding_index)
        weight.copy_(values.mul_(step.factor))
        after = _std(weight, step.padding_index)
    return InitializedWeight(
        name=step.view.parameter_name,
        role=step.role,
        stack=step.stack,
        layer=step.layer,
        shape=step.view.shape,
        factor=step.factor,
        drawn=step.draw != "kept",
        std_found=found,
        std_before=before,
        std_after=after,
    )


@torch.no_grad()
def zero_biases_(steps: Sequence[Step]) -> None:
    """Set the biases of output and feed-forward layers to 0."""
    for bias in _biases(steps):
        bias.zero_()


def largest_bias(steps: Sequence[Step]) -> float:
    """Return the largest magnitude of the biases of output and feed-forward layers, 0 where there
    are none."""
    return max((bias.detach().abs().max().item() for bias in _biases(steps)), default=0.0)


def _biases(steps: Sequence[Step]) -> list[Tensor]:
    owners = [
        step.view.owner
        for step in steps
        if step.role in ("output", "feedforward_in", "feedforward_out")
    ]
    biases = [getattr(owner, "bias", None) for owner in owners]
    return [bias for bias in biases if isinstance(bias, Tensor)]


def _drawn(step: Step, weight: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return fresh numbers, shape (out, in), before the factor: in float32 at least, on a
    generator's own device."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    device = weight.device if generator is None else generator.device
    values = torch.empty(step.view.shape, dtype=dtype, device=device)
    if step.draw == "embedding":
        nn.init.normal_(values, std=1.0 / math.sqrt(values.shape[1]), generator=generator)
    elif step.draw == "xavier_uniform":
        nn.init.xavier_uniform_(values, generator=generator)
    else:
        nn.init.xavier_normal_(values, generator=generator)
    if step.padding_index is not None:
        values[step.padding_index] = 0.0
    return values.to(weight.device)


def _std(weight: Tensor, padding_index: int | None) -> float:
    values = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    if padding_index is not None and values.shape[0] > 1:
        keep = (
            torch.arange(values.shape[0], device=values.device) != padding_index % values.shape[0]
        )
        values = values[keep]
    return values.std(correction=0).item()
