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
from wellposed.nn._checks import Part, check_tokens
from wellposed.nn._registry import FEEDFORWARDS
from wellposed.options import Size
from wellposed.registry import Registry

ACTIVATIONS = Registry[Callable[[Tensor], Tensor]]("activation")
"""Scalar nonlinearities of a feed-forward layer."""

ACTIVATIONS.register("relu")(F.relu)
ACTIVATIONS.register("gelu")(F.gelu)


@ACTIVATIONS.register("unit_gelu")
@known_keywords  # the registry and the rule of its slope know one function
def unit_gelu(x: Tensor) -> Tensor:
    """Return `x Phi(x) / 1.128905`, whose largest slope is 1 (Newhouse et al. 2025).

    >>> import torch
    >>> unit_gelu(torch.zeros(2)).tolist()
    [0.0, 0.0]
    """
    return F.gelu(x) / 1.128905


class _TwoLayers(Part):
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

    Exact up to rounding. Vaswani et al. (2017), eq. 2 with `relu`; `gelu` is x Phi(x), the exact
    one (Hendrycks and Gimpel 2016), `unit_gelu` that over its largest slope.

    Args:
        embed_dim: width D of a token.
        hidden_dim: width of the hidden layer.
        activation: name in `ACTIVATIONS`: relu, gelu or unit_gelu.
        bias: whether the two layers have a bias.

    Raises:
        ConfigError: the activation is unknown.

    Cost: 2 N D hidden_dim multiply-adds for N tokens.

    >>> import torch
    >>> MLP(8, 32, activation="relu")(torch.randn(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    shown = ("activation_name",)

    def __init__(
        self, embed_dim: Size, hidden_dim: Size, *, activation: str = "gelu", bias: bool = True
    ) -> None:
        super().__init__(embed_dim, hidden_dim, ACTIVATIONS.get(activation), bias)
        self.activation_name = activation


@FEEDFORWARDS.register("mlp")
def _build_mlp(config: Any) -> MLP:
    width, activation = config.hidden_size, MLPOptions.of(config).activation
    return MLP(width, config.intermediate_size, activation=activation)


class MaxMin(nn.Module):
    r"""`(x_i, x_{i + D/2}) -> (max, min)`: `|f(x) - f(y)| <= |x - y|` and `|f(x)| = |x|`, in every
    p-norm.

    Exact. It sorts the pair of each entry of the first half of the width and its partner in the
    second, so almost everywhere it permutes entries and keeps the norm of a gradient, which ReLU
    does not. Anil, Lucas, Grosse (2019), "Sorting out Lipschitz function approximation", group sort
    with groups of two.

    Raises:
        ShapeError: the width is odd.

    Cost: two comparisons an entry.

    >>> MaxMin()(torch.tensor([1.0, 5.0, 2.0, 4.0])).tolist()
    [2.0, 5.0, 1.0, 4.0]
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to the same shape, D even."""
        if x.shape[-1] % 2:
            raise ShapeError(
                f"MaxMin: width {x.shape[-1]} is odd; expected an even width, whose entries make"
                " pairs"
            )
        first, second = x.chunk(2, -1)
        return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], -1)


class MaxMinFeedForward(_TwoLayers):
    r"""`f(x) = W_2 MaxMin(W_1 x + b) + c` for each token: `|f(x) - f(y)| <= |W_2| |W_1| |x - y|`.

    1-Lipschitz in norms tok and 2 where no singular value of the two weights is above 1, in inf
    where no absolute row sum is; and norm-preserving where they are orthogonal. The bound is proved
    (theory note B12); `wellposed.certify` measures the weights. Anil, Lucas, Grosse (2019).

    Args:
        embed_dim: width D of a token.
        hidden_dim: width of the hidden layer, even.
        bias: whether the two layers have a bias; biases are free in the bound.

    Raises:
        ConfigError: a size that is no integer of at least 1, or an odd hidden width.

    Cost: 2 N D hidden_dim multiply-adds for N tokens, as `MLP`.

    >>> MaxMinFeedForward(8, 32)(torch.randn(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    def __init__(self, embed_dim: Size, hidden_dim: Size, *, bias: bool = True) -> None:
        if hidden_dim % 2:
            raise ConfigError(
                f"MaxMinFeedForward: hidden_dim={hidden_dim}: expected an even width, whose entries"
                f" make pairs; take {hidden_dim + 1}"
            )
        super().__init__(embed_dim, hidden_dim, MaxMin(), bias)


FEEDFORWARDS.register("maxmin")(
    lambda config: MaxMinFeedForward(config.hidden_size, config.intermediate_size)
)
