"""Numbers made of singular values: condition number and stable rank."""

from __future__ import annotations

import math

from torch import Tensor

from wellposed.errors import ShapeError
from wellposed.linalg._singular import singular_values


def condition_number(weight: Tensor) -> float:
    """Return ``sigma_1 / sigma_min(m, n)``: 1 for (a multiple of) an orthogonal weight, infinite
    for one of lower rank.

    Status: exact to float64 rounding of the SVD; a ratio above about 1e16 is not told from
    infinity. A rectangular weight is judged by its ``min(m, n)`` singular values.

    Args:
        weight: ``(m, n)``, real, finite, any floating dtype.

    Raises:
        ShapeError, ConfigError, ConvergenceError: as `singular_values`.

    Cost: one float64 SVD without vectors. When not to use: on a weight whose rank is low by design.

    >>> import torch
    >>> condition_number(torch.diag(torch.tensor([8.0, 2.0])))
    4.0
    >>> condition_number(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    inf
    """
    return condition_of(singular_values(weight))


def stable_rank(weight: Tensor) -> float:
    """Return ``|W|_F^2 / |W|_2^2``, from 1 to ``min(m, n)``, which it is if and only if all
    singular values agree.

    Status: exact to float64 rounding. Source: Rudelson and Vershynin (2007); not the ratio of mean
    to largest singular value, which some libraries call by this name.

    Args:
        weight: ``(m, n)``, real, finite, not zero.

    Raises:
        ShapeError: also for the zero matrix, whose stable rank does not exist.
        ConfigError, ConvergenceError: as `singular_values`.

    Cost: one float64 SVD without vectors.

    >>> import torch
    >>> stable_rank(torch.diag(torch.tensor([2.0, 1.0, 1.0])))  # (4 + 1 + 1) / 4
    1.5
    """
    values = singular_values(weight)
    if values[0] == 0:
        raise ShapeError(
            f"the weight of shape {tuple(weight.shape)} is zero; its stable rank does not exist"
        )
    return (values / values[0]).square().sum().item()


def condition_of(values: Tensor) -> float:
    """Return the ratio of the first to the last of descending singular values; infinite where the
    last is 0."""
    largest, smallest = values[0].item(), values[-1].item()
    return largest / smallest if smallest > 0 else math.inf
