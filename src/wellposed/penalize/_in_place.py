"""Add the gradient of weight terms to ``.grad`` by matrix products alone, without a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from wellposed.errors import ConfigError, listed
from wellposed.functional.penalties import accumulate_gram_penalty_
from wellposed.linalg.sharded import is_sharded
from wellposed.penalize._terms import How, Term
from wellposed.roles import WeightView
from wellposed.roles.adapters import AdaptedView


def check_in_place(terms: Sequence[Term], hows: Mapping[str, How]) -> None:
    """Raise `ConfigError` for terms whose gradient only autograd can give; every one is named."""
    offenders = [f"{name}: form 'qr'" for name, how in hows.items() if how.form == "qr"]
    for view in (view for term in terms for view in term.views):
        if isinstance(view, AdaptedView):
            offenders.append(
                f"{view.parameter_name}: the gradient goes to the factors of its adapters"
            )
        elif not view.parameter.is_leaf:
            offenders.append(
                f"{view.parameter_name}: a parametrised weight, computed from another parameter"
            )
        elif is_sharded(view.parameter):
            offenders.append(f"{view.parameter_name}: sharded over processes")
    if offenders:
        raise ConfigError(
            "accumulate_() cannot add these gradients in place; use penalty() and backward():\n"
            + listed(list(dict.fromkeys(offenders)))
        )


def accumulate_term_(term: Term, how: How, strength: float) -> Tensor:
    """Return ``strength`` times the term and add its gradient to ``.grad`` of its parameters."""
    with torch.no_grad():
        weights = [view.tensor() for view in term.views]
        return accumulate_gram_penalty_(
            weights,
            [_gradient(view) for view in term.views],
            strength=strength,
            squared=how.form == "gram_squared",
            side=term.side,
            gram_dtype=how.gram_dtype,
        )


def _gradient(view: WeightView) -> Tensor | None:
    """Return the part of ``.grad`` that belongs to a view, in its orientation; None for a frozen
    parameter."""
    parameter = view.parameter
    if not parameter.requires_grad:
        return None
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = parameter.grad.squeeze(0) if parameter.ndim == 3 else parameter.grad
    gradient = gradient.t() if view.transposed else gradient
    return gradient if view.rows is None else gradient[view.rows[0] : view.rows[1]]
