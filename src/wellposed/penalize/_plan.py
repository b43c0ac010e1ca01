"""The cost of a call of the penalty and its backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from wellposed.penalize._terms import Term
from wellposed.penalize._weights import weight_parts
from wellposed.plan import Plan, counted_plan


def planned(model: nn.Module, terms: Sequence[Term], *notes: str) -> Plan:
    """Return the plan of weight terms and their gradients."""

    def run() -> None:
        parts = [part for _, part in weight_parts(terms, {term.strength: 1.0 for term in terms})]
        total = torch.cat([part.to(parts[0].device) for part in parts]).sum()
        if total.requires_grad:
            total.backward()

    pairs = [(term.strength, view) for term in terms for view in term.views]
    kinds = [(name, view.shape, view.parameter.dtype) for name, view in pairs]
    return counted_plan("OrthogonalityPenalty", model, kinds, run, *notes)
