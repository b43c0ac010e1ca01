"""`ELU((x U * sigma) V)` as a module."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.errors import ConfigError, ShapeError
from wellposed.functional.gram import gram_attention, per_token, spectrum_fits
from wellposed.nn.plain import is_plain
from wellposed.nn.transject.orthogonal_linear import OrthogonalLinear, transposed_weight


class GramAttention(nn.Module):
    """`F(x) = ELU((x U * sigma) V)`, U and V orthogonal, without bias: 1-Lipschitz in x for
    `|sigma| <= 1`.

    Exact up to rounding. Sengupta et al. (2023), Theorem 1; the released code adds biases, which
    are left out here because they make the norm of the map grow like sqrt d. U and V are orthogonal
    at the start and plain parameters; `constrain_` with `where="*.left"` and `"*.right"` holds
    them. Tokens meet only in sigma (see `GramSpectrum`).

    Where `left` or `right` is wrapped (an adapter), hooked or parametrised, both are called as
    modules.

    Args:
        embed_dim: width d.

    Raises:
        ConfigError: `embed_dim` is no integer of at least 1.

    Cost: 2 N d^2 multiply-adds for N tokens, or N d^2 + d^3 for each sigma, whichever is less;
    memory linear in N.

    >>> import torch
    >>> attention = GramAttention(8)
    >>> x, y = torch.randn(2, 3, 5, 8)
    >>> images = attention(x, torch.ones(8)), attention(y, torch.ones(8))
    >>> bool(((images[0] - images[1]).norm(dim=-1) <= (x - y).norm(dim=-1) * (1 + 1e-5)).all())
    True
    """

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.left = OrthogonalLinear(embed_dim)
        self.right = OrthogonalLinear(embed_dim)

    def reset_parameters(self) -> None:
        """Draw U and V anew."""
        self.left.reset_parameters()
        self.right.reset_parameters()

    def forward(self, x: Tensor, sigma: Tensor, *, folded: bool | None = None) -> Tensor:
        """Map (batch, tokens, d) with sigma (d,), (batch, d) or (batch, tokens, d); see
        `functional.gram_attention`.

        Raises:
            ShapeError: the shapes do not fit.
            ConfigError: `folded` with a map that is wrapped, hooked or parametrised: there is no
            one weight to fold.
        """
        if self.has_plain_maps():
            return gram_attention(
                x, transposed_weight(self.left), transposed_weight(self.right), sigma, folded=folded
            )
        if folded:
            raise ConfigError(
                f"GramAttention: folded=True with left {type(self.left).__name__} and right"
                f" {type(self.right).__name__}, one of them wrapped, hooked or parametrised;"
                " expected plain OrthogonalLinear; leave folded out, or merge the adapter and"
                " remove the hooks"
            )
        if not spectrum_fits(x, sigma):
            raise ShapeError(
                f"GramAttention: received x {tuple(x.shape)} and sigma {tuple(sigma.shape)};"
                " expected x (batch, tokens, d) and sigma (d,), (batch, d) or (batch, tokens, d)"
            )
        return F.elu(self.right(self.left(x) * per_token(sigma)))

    def has_plain_maps(self) -> bool:
        """Return whether U and V are all that `left` and `right` do, so that they need not be
        called."""
        return is_plain(self.left, OrthogonalLinear) and is_plain(self.right, OrthogonalLinear)

    def norm_bound(self) -> float:
        """Return a bound of `|U| |V|`, 1 up to rounding where they are orthogonal: F's constant for
        `|sigma| <= 1`."""
        return self.left.norm_bound() * self.right.norm_bound()
