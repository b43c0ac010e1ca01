"""Ways to join a branch to its input: plain, ReZero, and two that keep a Lipschitz budget."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor, nn

from wellposed.model_options import BudgetOptions
from wellposed.nn._checks import CheckedModule, Share
from wellposed.nn._registry import RESIDUALS
from wellposed.options import Gt, Positive, Size


class PlainResidual(nn.Module):
    """`x + f(x)` (He et al. 2016, eq. 1).

    >>> PlainResidual()(torch.ones(2), torch.full((2,), 3.0))
    tensor([4., 4.])
    """

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        """Add the branch `f(x)` to `x`."""
        return x + branch


class ReZeroResidual(nn.Module):
    """`x + a f(x)` with one learnt scalar `a`, 0 at the start: exactly the identity at first.

    Exact. Bachlechner et al. (2021), "ReZero is All You Need", eq. 1. In the first step only `a`
    has a gradient, not the branch. The shape of `a` is (1,), since sharding needs a dimension.

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


Divisor: TypeAlias = Annotated[
    Positive,
    "an upper bound of the branch's Lipschitz constant, for instance wellposed.certify(branch,"
    " seq_len=...).total",
]
Budget: TypeAlias = Annotated[
    float, Gt(1), "x alone has the constant 1; for a map of constant 1 use ConvexResidual"
]


class _DividedBranch(CheckedModule, ABC):
    """A residual with one learnt scalar and a branch divided by a stored bound."""

    divisor: Tensor
    repr_fields = ("divisor",)

    def __init__(self, start: float, divisor: Divisor) -> None:
        super().__init__()
        self._start = start
        self.logit = nn.Parameter(torch.empty(1))
        self.register_buffer("divisor", torch.tensor([float(divisor)]))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the scalar to its start value."""
        nn.init.constant_(self.logit, math.log(self._start) - math.log1p(-self._start))

    @abstractmethod
    def weights(self) -> tuple[Tensor | None, Tensor]:
        """Return the factors of `x` (None means 1) and of the branch, with gradient."""

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        """Join the branch `g(x)` to `x`."""
        skip, scale = self.weights()
        x = x if skip is None else x * skip.to(x.dtype)
        return torch.addcmul(x, branch, scale.to(branch.dtype))

    @torch.no_grad()
    def coefficients(self) -> tuple[float, float]:
        """Return the two factors, of `x` and of `g(x)`."""
        skip, scale = self.weights()
        return 1.0 if skip is None else float(skip), float(scale)


class ConvexResidual(_DividedBranch):
    """`(1 - a) x + a g(x) / m`, `a` learnt: `|f(x) - f(y)| <= ((1 - a) + a Lip(g)/m) |x - y|`.

    Proved: 1-Lipschitz in any norm, at any depth, if `m >= Lip(g)` (theory note B12). The module
    stores m and does not check it: `wellposed.certify` measures `Lip(g)` and counts any excess over
    m. Use m = 1 for a 1-Lipschitz branch (`BallAttention`, or `MaxMinFeedForward` with weights of
    norm 1).

    Args:
        share: `a` at the start, in (0, 1), else ConfigError; `a = sigmoid(s)`, s learnt.
        divisor: `m`, > 0, else ConfigError; a buffer, saved with the weights.

    Cost: two passes over the tokens.
    When not to use: in a deep stack with a small weight on x, which forgets the input.

    >>> ConvexResidual(0.25)(torch.zeros(2), torch.ones(2)).tolist()
    [0.25, 0.25]
    """

    def __init__(self, share: Share = 0.5, divisor: Divisor = 1.0) -> None:
        super().__init__(share, divisor)

    def weights(self) -> tuple[Tensor, Tensor]:
        share = torch.sigmoid(self.logit)
        return 1 - share, share / self.divisor


class BudgetResidual(_DividedBranch):
    """`x + b g(x) / m`, `1 + b = L^(s / n)`, s in (0, 1) learnt: n in a row are L-Lipschitz.

    Proved: one has the constant `1 + b Lip(g)/m`, so n have at most L if `m >= Lip(g)` (theory note
    B12). The module stores m and does not check it: `wellposed.certify` measures `Lip(g)` and
    counts any excess over m. A certified radius is then the margin over L.

    Args:
        budget: Limit L of the whole stack, finite and > 1 (x alone has the constant 1).
        blocks: Number n of residuals that share the budget (two per Transformer block).
        share: `s` at the start, in (0, 1).
        divisor: `m`, > 0; a buffer, saved with the weights.

    Raises:
        ConfigError: An argument is out of its range.

    Cost: one pass over the tokens.
    When not to use: if the constant must be 1; use `ConvexResidual`.

    >>> round(BudgetResidual(4.0, blocks=1, share=0.5)(torch.ones(1), torch.ones(1)).item(), 4)
    2.0
    """

    repr_fields = ("budget", "blocks", "divisor")

    def __init__(
        self, budget: Budget, blocks: Size = 1, *, share: Share = 0.5, divisor: Divisor = 1.0
    ) -> None:
        super().__init__(share, divisor)
        self.budget = float(budget)
        self.blocks = blocks

    def weights(self) -> tuple[None, Tensor]:
        share = torch.sigmoid(self.logit) * (math.log(self.budget) / self.blocks)
        return None, torch.expm1(share) / self.divisor


def _count(config: Any) -> int:
    """Number of residuals: two per block, three per block of a decoder that reads an encoder."""
    decoder = 3 * config.decoder_depth if getattr(config, "is_encoder_decoder", False) else 0
    return 2 * getattr(config, "num_hidden_layers", 1) + decoder


# At the start all n of a model together pass on `(1 - 1/(n + 1))^n > 1/e` of x.
RESIDUALS.register("convex")(lambda config: ConvexResidual(1 / (_count(config) + 1)))


@RESIDUALS.register("mean")
def build_mean(config: Any) -> ConvexResidual:
    """Build `(1 - 1/n) x + g(x) / n` for n residuals, not learnt (Newhouse et al. 2025)."""
    residual = ConvexResidual(1 / _count(config))
    residual.logit.requires_grad = False
    return residual


# Each gets an equal share of the whole model's budget.
RESIDUALS.register("budget")(
    lambda config: BudgetResidual(BudgetOptions.from_config(config).budget, _count(config))
)
