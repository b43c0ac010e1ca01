"""TransJect's feed-forward: two orthogonal maps."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.errors import ConfigError
from wellposed.nn.transject.orthogonal_linear import OrthogonalLinear


class OrthogonalFeedForward(nn.Module):
    """`f(x) = ELU(W2 ELU(W1 x))` for each token, W1 and W2 square and orthogonal, without bias:
    1-Lipschitz.

    Exact up to rounding, in eval mode. Sengupta et al. (2023), sec. 3.4, without their biases. It
    is the branch alone; `InjectiveResidual` joins it to x. Held in training by `constrain_` with
    `where="*.up_proj"` and `"*.down_proj"`.

    Args:
        embed_dim: width d.
        dropout: rate between the two maps, in training; it multiplies the constant by
        `1/(1 - dropout)` there.

    Raises:
        ConfigError: a rate outside [0, 1).

    Cost: 2 N d^2 multiply-adds for N tokens.

    >>> import torch
    >>> OrthogonalFeedForward(8)(torch.randn(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    def __init__(self, embed_dim: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise ConfigError(
                f"OrthogonalFeedForward: dropout is {dropout}; expected a rate in [0, 1)"
            )
        self.dropout = dropout
        self.up_proj = OrthogonalLinear(embed_dim)
        self.down_proj = OrthogonalLinear(embed_dim)

    def reset_parameters(self) -> None:
        """Draw W1 and W2 anew."""
        self.up_proj.reset_parameters()
        self.down_proj.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., d) to (..., d)."""
        inner = F.dropout(F.elu(self.up_proj(x)), self.dropout, self.training)
        return F.elu(self.down_proj(inner))

    def norm_bound(self) -> float:
        """Return a bound of `|W1| |W2|`, 1 up to rounding where they are orthogonal: f's Lipschitz
        constant."""
        return self.up_proj.norm_bound() * self.down_proj.norm_bound()

    def extra_repr(self) -> str:
        """The rate of dropout."""
        return f"dropout={self.dropout}"
