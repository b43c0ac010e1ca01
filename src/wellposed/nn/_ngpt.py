"""Parts of the normalized Transformer (nGPT): learnt scales, unit states, a gated feed-forward."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.model_options import NGPTOptions
from wellposed.nn._checks import CheckedModule, check_tokens
from wellposed.nn._registry import FEEDFORWARDS, RESIDUALS
from wellposed.options import Positive, Size


def unit_vectors(x: Tensor) -> Tensor:
    """Return ``x / |x|`` of each vector of x (..., D); a vector of zeros stays zero.

    Exact up to rounding.

    >>> unit_vectors(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
    """
    return F.normalize(x, dim=-1, eps=torch.finfo(x.dtype).tiny)


class LearnedScale(CheckedModule):
    """`x -> s x`, one learnt factor for each of ``size`` features.

    Exact. The parameter begins at ``unit`` and `s` at ``start``, so a step of Adam at the rate r
    moves `s` by `r start / unit`. Loshchilov et al. (2025, arXiv 2410.01131), sec. 2.5.

    Args:
        size: Number of features.
        start: First value of `s`.
        unit: First value of the parameter.

    >>> LearnedScale(2, start=3.0, unit=0.5)(torch.ones(2)).tolist()
    [3.0, 3.0]
    """

    repr_fields = ("size", "start", "unit")

    def __init__(self, size: Size, *, start: Positive = 1.0, unit: Positive = 1.0) -> None:
        super().__init__()
        self.size = size
        self.start = start
        self.unit = unit
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the parameter to ``unit``."""
        nn.init.constant_(self.weight, self.unit)

    @torch.no_grad()
    def resize_(self, size: int) -> None:
        """Keep the first ``size`` factors; new ones begin at ``start``."""
        weight = self.weight.new_full((size,), self.unit)
        common = min(size, self.size)
        weight[:common] = self.weight[:common]
        self.weight = nn.Parameter(weight, self.weight.requires_grad)
        self.size = size

    def factors(self) -> Tensor:
        """Return `s`, (size,), with gradient."""
        return self.weight * (self.start / self.unit)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., size) to the same shape."""
        return x * self.factors().to(x.dtype)


class NGPTResidual(CheckedModule):
    """`n(x + a (n(f(x)) - x))`, `n(x) = x / |x|`: states stay on the unit sphere.

    Exact up to rounding. `a >= 0` are the learnt eigen learning rates, one for each feature.
    Loshchilov et al. (2025, arXiv 2410.01131), "nGPT", sec. 2.2; in their code `a` is the
    absolute value of a parameter, as here.

    Args:
        embed_dim: Width D of a token.
        alpha: First value of `a`; paper: 0.05, about one over the number of layers.

    Cost: two norms and six passes over the tokens.
    When not to use: for a certificate or an inverse. `n` has no Lipschitz constant near 0, and
    `certify` refuses it.

    >>> residual = NGPTResidual(2, alpha=1.0)
    >>> residual(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 5.0])).round(decimals=3).tolist()
    [0.0, 1.0]
    """

    no_bound = (
        "which divides states and branch by their norms, which has no Lipschitz constant near 0"
    )

    def __init__(self, embed_dim: Size, alpha: Positive = 0.05) -> None:
        super().__init__()
        self.rate = LearnedScale(embed_dim, start=alpha, unit=1.0 / math.sqrt(embed_dim))

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        """Move `x` towards the direction of the branch `f(x)`."""
        rate = self.rate.factors().abs().to(x.dtype)
        return unit_vectors(torch.lerp(x, unit_vectors(branch).to(x.dtype), rate))


RESIDUALS.register("ngpt")(
    lambda config: NGPTResidual(config.hidden_size, NGPTOptions.from_config(config).ngpt_alpha)
)


class NGPTFeedForward(CheckedModule):
    """`W_down (s_u u * SiLU(sqrt(D) s_v v))`, `u = W_up x`, `v = W_gate x`, for each token; no bias.

    Exact up to rounding. `s_u` and `s_v` are learnt, 1 at the start. With rows of norm 1, `v` has
    entries of size `1 / sqrt(D)`, which the factor undoes. Loshchilov et al. (2025, arXiv
    2410.01131), "nGPT", sec. 2.4.

    Args:
        embed_dim: Width D of a token.
        hidden_dim: Width of the hidden layer; 8/3 D has the parameters of an `MLP` of 4 D.

    Cost: 3 N D hidden_dim multiply-adds for N tokens.
    When not to use: with weights that are not kept at unit norm; use `MLP`.

    >>> NGPTFeedForward(8, 32)(torch.randn(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    def __init__(self, embed_dim: Size, hidden_dim: Size) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.up_proj = nn.Linear(embed_dim, hidden_dim, bias=False)
        self.gate_proj = nn.Linear(embed_dim, hidden_dim, bias=False)
        self.down_proj = nn.Linear(hidden_dim, embed_dim, bias=False)
        self.up_scale = LearnedScale(hidden_dim)
        self.gate_scale = LearnedScale(hidden_dim, start=math.sqrt(embed_dim))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., embed_dim) to (..., embed_dim)."""
        check_tokens(self, x, self.embed_dim)
        up = self.up_scale(self.up_proj(x))
        gate = self.gate_scale(self.gate_proj(x))
        return self.down_proj(up * F.silu(gate))


@FEEDFORWARDS.register("ngpt")
def _build_feedforward(config: Any) -> NGPTFeedForward:
    return NGPTFeedForward(config.hidden_size, config.intermediate_size)
