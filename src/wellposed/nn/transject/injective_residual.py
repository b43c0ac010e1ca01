"""A residual whose branch is too small to undo its input."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from wellposed.errors import unknown_name
from wellposed.nn.sizes import check_sizes

ResidualStart = Literal["rezero", "sigmoid"]
_STARTS: tuple[str, ...] = ("rezero", "sigmoid")


class InjectiveResidual(nn.Module):
    """`x + (alpha/L) f(x)`, `|alpha| < 1`: injective, distances change by a factor in
    `[1 - |alpha|/L, 1 + |alpha|/L]`.

    Exact for f with Lipschitz constant 1. Sengupta et al. (2023), eq. 2. They ask for
    `alpha = sigmoid(w)` and for
    ReZero at once, which contradict each other: sigmoid(0) = 1/2. `"rezero"` is `alpha = tanh(w)`,
    w = 0 at the start (Bachlechner et al. 2021): exactly the identity then, and w alone has a
    gradient in the first step. `"sigmoid"` is `alpha = sigmoid(w)`, in (0, 1). In floating point
    alpha reaches 1 for large w; at L = 1 `inverse` then refuses.

    Args:
        num_layers: L.
        start: `"rezero"` or `"sigmoid"`.

    Raises:
        ConfigError: `num_layers` is no integer of at least 1, or `start` is unknown.

    >>> residual = InjectiveResidual(3)
    >>> residual(torch.ones(2), torch.full((2,), 3.0)).tolist()
    [1.0, 1.0]
    """

    def __init__(self, num_layers: int, start: ResidualStart = "rezero") -> None:
        super().__init__()
        check_sizes("InjectiveResidual", num_layers=num_layers)
        if start not in _STARTS:
            raise unknown_name("residual start", start, _STARTS)
        self.num_layers = num_layers
        self.start: ResidualStart = start
        self.weight = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set w = 0: alpha is 0 for ReZero, 1/2 for the sigmoid."""
        nn.init.zeros_(self.weight)

    def scale(self) -> Tensor:
        """Return `alpha/L`, (1,)."""
        alpha = self.weight.tanh() if self.start == "rezero" else self.weight.sigmoid()
        return alpha / self.num_layers

    def coefficients(self) -> tuple[float, float]:
        """Return (a, b) of `a x + b f(x)`, for certificates."""
        return 1.0, float(self.scale().detach())

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        """Add `alpha/L` times the branch `f(x)` to `x`."""
        return torch.addcmul(x, self.scale().to(x.dtype), branch.to(x.dtype))

    def extra_repr(self) -> str:
        """The number of layers and the start."""
        return f"{self.num_layers}, start={self.start!r}"
