"""Ways to join a branch to its input."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wellposed.nn._registry import RESIDUALS


class PlainResidual(nn.Module):
    """`x + f(x)` (He et al. 2016, eq. 1).

    >>> PlainResidual()(torch.ones(2), torch.full((2,), 3.0))
    tensor([4., 4.])
    """

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        """Add the branch `f(x)` to `x`."""
        return x + branch


class ReZeroResidual(nn.Module):
    """`x + a f(x)` with one learnt scalar `a = 0` at the start: exactly the identity at
    initialisation.

    Exact. Bachlechner et al. (2021), "ReZero is All You Need", eq. 1. The branch gets no gradient
    in the first step, while `a` does. The scalar has shape (1,), since sharding refuses parameters
    without a dimension.

    >>> residual = ReZeroResidual()
    >>> residual(torch.ones(2), torch.full((2,), 3.0)).tolist()
    [1.0, 1.0]
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set `a = 0`."""
        nn.init.zeros_(self.scale)

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        """Add `a` times the branch `f(x)` to `x`."""
        return x + self.scale * branch


RESIDUALS.register("plain")(lambda _: PlainResidual())
RESIDUALS.register("rezero")(lambda _: ReZeroResidual())
