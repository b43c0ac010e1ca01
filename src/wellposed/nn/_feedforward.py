"""The token-wise two-layer network of a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.model_options import MLPOptions
from wellposed.nn._registry import FEEDFORWARDS
from wellposed.registry import Registry

ACTIVATIONS = Registry[Callable[[Tensor], Tensor]]("activation")
"""Scalar nonlinearities of a feed-forward layer."""

ACTIVATIONS.register("relu")(F.relu)
ACTIVATIONS.register("gelu")(F.gelu)


@ACTIVATIONS.register("unit_gelu")
def unit_gelu(x: Tensor) -> Tensor:
    """Return `x Phi(x) / 1.128905`, whose largest slope is 1 (Newhouse et al. 2025).

    >>> import torch
    >>> unit_gelu(torch.zeros(2)).tolist()
    [0.0, 0.0]
    """
    return F.gelu(x) / 1.128905


class MLP(nn.Module):
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

    def __init__(
        self, embed_dim: int, hidden_dim: int, *, activation: str = "gelu", bias: bool = True
    ) -> None:
        super().__init__()
        self.activation_name = activation
        self.activation = ACTIVATIONS.get(activation)
        self.up_proj = nn.Linear(embed_dim, hidden_dim, bias=bias)
        self.down_proj = nn.Linear(hidden_dim, embed_dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., embed_dim) to (..., embed_dim)."""
        return self.down_proj(self.activation(self.up_proj(x)))

    def extra_repr(self) -> str:
        return f"activation={self.activation_name}"


@FEEDFORWARDS.register("mlp")
def build_mlp(config: Any) -> MLP:
    """Build the two-layer network."""
    return MLP(
        config.hidden_size, config.intermediate_size, activation=MLPOptions.of(config).activation
    )
