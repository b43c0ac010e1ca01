"""The additive coupling: invertible whatever its two parts are."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import ConvergenceError, ShapeError
from wellposed.nn.invertible.residual import refuse_randomness
from wellposed.nn.invertible.solver import Inversion


class AdditiveCoupling(nn.Module):
    r"""`y_1 = x_1 + f(x_2)`, `y_2 = x_2 + g(y_1)` on the two halves of the width: invertible for
    *any* f and g.

    Exact inverse up to rounding, `x_2 = y_2 - g(y_1)`, `x_1 = y_1 - f(x_2)`, at the cost of one
    forward pass and without a Lipschitz bound. Gomez et al. (2017), "The Reversible Residual
    Network", eq. 6 to 8. Rounding grows with the slopes of f and g, unlike in a contractive
    `InvertibleResidual`.

    Args:
        f: maps the second half of the width to the size of the first; called with the options of
        `forward`.
        g: maps the first half to the size of the second; called with the tensor alone unless
        `g_options` is set.
        g_options: whether g gets the options as well (False suits attention f, feed-forward g).

    >>> block = AdditiveCoupling(nn.Linear(3, 3), nn.Linear(3, 3))
    >>> x = torch.randn(2, 6)
    >>> bool(torch.allclose(block.inverse(block(x))[0], x, atol=1e-6))
    True
    """

    def __init__(self, f: nn.Module, g: nn.Module, *, g_options: bool = False) -> None:
        super().__init__()
        self.f = f
        self.g = g
        self.g_options = g_options

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """Map (..., D) to (..., D), D even."""
        first, second = _halves(x)
        first = first + self.f(second, **options)
        return torch.cat([first, second + self._second(first, options)], -1)

    @torch.no_grad()
    def inverse(self, y: Tensor, **options: Any) -> tuple[Tensor, Inversion]:
        """Return x with `forward(x) = y`, and a report: one evaluation of f and g, error by
        rounding only.

        How far rounding grows depends on the slopes of f and g, which are not known: `error_bound`
        is infinite.

        Args:
            y: (..., D). `tol`, `max_iter` and `accelerate` are accepted for symmetry with
                `InvertibleResidual`; there is nothing to iterate.
            options: passed to f.

        Raises:
            ConvergenceError: y is not finite.
            ConfigError: f or g draws random numbers in its present mode.
        """
        for name in ("tol", "max_iter", "accelerate"):
            options.pop(name, None)
        refuse_randomness(self, "inverse")
        if not bool(y.isfinite().all()):
            raise ConvergenceError(
                "AdditiveCoupling.inverse: y holds NaN or infinity; expected finite numbers"
            )
        first, second = _halves(y)
        second = second - self._second(first, options)
        x = torch.cat([first - self.f(second, **options), second], -1)
        return x, Inversion(1, 0.0, math.inf, 0.0, "tok")

    def _second(self, first: Tensor, options: dict[str, Any]) -> Tensor:
        return self.g(first, **options) if self.g_options else self.g(first)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape[-1] % 2:
        raise ShapeError(
            f"AdditiveCoupling: width {x.shape[-1]} is odd; expected two halves of equal width"
        )
    first, second = x.chunk(2, -1)
    return first, second
