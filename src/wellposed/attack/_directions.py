"""Perturbations of a batch of inputs (batch, tokens, width): their size, and the steepest of size
1."""

from __future__ import annotations

from torch import Tensor

from wellposed.linalg import Norm


def perturbation_size(delta: Tensor, norm: Norm) -> Tensor:
    """Return the norm of each perturbation of a batch ``(batch, tokens, width)``, in tok, 2 or inf:
    ``(batch,)``.

    >>> import torch
    >>> perturbation_size(torch.tensor([[[3.0, 4.0], [0.0, 2.0]]]), "tok")
    tensor([5.])
    """
    if norm == 2:
        return delta.flatten(1).norm(dim=-1)
    return delta.norm(dim=-1).amax(-1) if norm == "tok" else delta.abs().flatten(1).amax(-1)


def steepest_direction(gradient: Tensor, norm: Norm) -> Tensor:
    """Return the perturbation of norm 1 along which a function with this gradient grows fastest,
    same shape.

    >>> import torch
    >>> steepest_direction(torch.tensor([[[3.0, -4.0]]]), "inf")
    tensor([[[ 1., -1.]]])
    """
    if norm == "inf":
        return gradient.sign()
    size = (
        gradient.flatten(1).norm(dim=-1)[:, None, None]
        if norm == 2
        else gradient.norm(dim=-1, keepdim=True)
    )
    return gradient / size.where(size > 0, 1.0)
