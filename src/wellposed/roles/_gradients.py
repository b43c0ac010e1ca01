"""Dependence of a tensor on the products of a pass, by gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wellposed.roles._record import Cut, Product


def rows_reached(tensor: Tensor, product: Cut) -> tuple[int, ...]:
    """Return the rows of a product that a tensor depends on, by a random gradient."""
    if not tensor.requires_grad:
        return ()
    (gradient,) = torch.autograd.grad(
        tensor, product.leaf, torch.randn_like(tensor), retain_graph=True, allow_unused=True
    )
    if gradient is None:
        return ()
    return tuple(gradient.reshape(-1, gradient.shape[-1]).ne(0).any(0).nonzero().flatten().tolist())


def are_added(tensor: Tensor, cuts: Sequence[Cut]) -> bool:
    """Return whether one entry depends on several cuts: they were added, not joined."""
    return len(cuts) > 1 and sum(bool(rows_reached(tensor[..., :1], cut)) for cut in cuts) > 1


def is_nonlinear(tensor: Tensor, product: Product) -> bool:
    """Return whether a tensor is not linear in a product: its gradient depends on it."""
    if not tensor.requires_grad:
        return False
    (gradient,) = torch.autograd.grad(
        tensor, product.leaf, torch.randn_like(tensor), create_graph=True, allow_unused=True
    )
    return gradient is not None and gradient.requires_grad
