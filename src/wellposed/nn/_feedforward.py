"""Token-wise two-layer networks of a block: a scalar nonlinearity, or sorted pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.call_checks import known_keywords
from wellposed.errors import ConfigError, ShapeError
from wellposed.model_options import MLPOptions
from wellposed.nn._checks import CheckedModule, check_tokens
from wellposed.nn._registry import FEEDFORWARDS
from wellposed.options import Size
from wellposed.registry import Registry

ACTIVATIONS = Registry[Callable[[Tensor], Tensor]]("activation")
"""Scalar nonlinearities of a feed-forward layer."""

ACTIVATIONS.register("relu")(F.relu)
ACTIVATIONS.register("gelu")(F.gelu)


@ACTIVATIONS.register("unit_gelu")
@known_keywords  # so that the registry and the rule of its slope hold the same function
def unit_gelu(x: Tensor) -> Tensor:
    """Return `x Phi(x) / 1.128905`, whose largest slope is 1 (Newhouse et al. 2025).

    >>> unit_gelu(torch.zeros(2)).tolist()
    [0.0, 0.0]
    """
    return F.gelu(x) / 1.128905


class _TwoLayers(CheckedModule):
    """`f(x) = W_down g(W_up x + b_up) + b_down` for each token."""

    def __init__(
        self, embed_dim: Size, hidden_dim: Size, activation: Callable[[Tensor], Tensor], bias: bool
    ) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.up_proj = nn.Linear(embed_dim, hidden_dim, bias=bias)
        self.activation = activation
        self.down_proj = nn.Linear(hidden_dim, embed_dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., embed_dim) to (..., embed_dim)."""
        check_tokens(self, x, self.embed_dim)
        return self.down_proj(self.activation(self.up_proj(x)))


class MLP(_TwoLayers):
    """`f(x) = W_down g(W_up x + b_up) + b_down` for each token, `g` a scalar nonlinearity.

    Exact up to rounding. Vaswani et al. (2017), eq. 2 with `relu`. `gelu` is the exact x Phi(x)
    (Hendrycks and Gimpel 2016), and `unit_gelu` divides that by its largest slope.

    Args:
        embed_dim: Width D of a token.
        hidden_dim: Width of the hidden layer.
        activation: Name in `ACTIVATIONS`: relu, gelu or unit_gelu; ConfigError for others.
        bias: Whether the two layers have a bias.

    Cost: 2 N D hidden_dim multiply-adds for N tokens.

    >>> MLP(8, 32, activation="relu")(torch.randn(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    repr_fields = ("activation_name",)

    def __init__(
        self, embed_dim: Size, hidden_dim: Size, *, activation: str = "gelu", bias: bool = True
    ) -> None:
        super().__init__(embed_dim, hidden_dim, ACTIVATIONS.get(activation), bias)
        self.activation_name = activation


@FEEDFORWARDS.register("mlp")
def _build_mlp(config: Any) -> MLP:
    width = config.hidden_size
    activation = MLPOptions.from_config(config).activation
    return MLP(width, config.intermediate_size, activation=activation)


class MaxMin(nn.Module):
    """`(x_i, x_{i + D/2}) -> (max, min)`: keeps the norm and is 1-Lipschitz, in every p-norm.

    Exact. It sorts each entry of the first half with its partner in the second. Almost everywhere
    this is a permutation, so it keeps the norm of a gradient; ReLU does not. Anil, Lucas, Grosse
    (2019), "Sorting out Lipschitz function approximation" (group sort, groups of two). Cost: two
    comparisons an entry. An odd width is a ShapeError.

    >>> MaxMin()(torch.tensor([1.0, 5.0, 2.0, 4.0])).tolist()
    [2.0, 5.0, 1.0, 4.0]
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to the same shape, D even."""
        if x.shape[-1] % 2:
            raise ShapeError(
                f"MaxMin: width {x.shape[-1]} is odd; expected an even width, to form pairs"
            )
        first, second = x.chunk(2, -1)
        return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], -1)


class MaxMinFeedForward(_TwoLayers):
    """`f(x) = W_2 MaxMin(W_1 x + b) + c` for each token: `|f(x) - f(y)| <= |W_2| |W_1| |x - y|`.

    Proved (theory note B12). 1-Lipschitz in norms tok and 2 if no singular value of the two weights
    is above 1, in inf if no absolute row sum is. It keeps norms if both weights are orthogonal.
    `wellposed.certify` measures the weights. Anil, Lucas, Grosse (2019).

    Args:
        embed_dim: Width D of a token.
        hidden_dim: Width of the hidden layer: even, else ConfigError.
        bias: Whether the two layers have a bias; biases do not change the bound.

    Cost: 2 N D hidden_dim multiply-adds for N tokens, as `MLP`.

    >>> MaxMinFeedForward(8, 32)(torch.randn(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    def __init__(self, embed_dim: Size, hidden_dim: Size, *, bias: bool = True) -> None:
        if hidden_dim % 2:
            raise ConfigError(
                f"MaxMinFeedForward: hidden_dim={hidden_dim}: expected an even width, to form"
                f" pairs; use {hidden_dim + 1}"
            )
        super().__init__(embed_dim, hidden_dim, MaxMin(), bias)


FEEDFORWARDS.register("maxmin")(
    lambda config: MaxMinFeedForward(config.hidden_size, config.intermediate_size)
)
