"""TransJect's attention: tokens mixed through the spectrum of their Gram matrix, linear in their
number."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.errors import ShapeError


def gram_attention(
    x: Tensor, left: Tensor, right: Tensor, sigma: Tensor, *, folded: bool | None = None
) -> Tensor:
    """Return `F(x) = ELU((x U * sigma) V)`, 1-Lipschitz in x for orthogonal U, V and
    `|sigma| <= 1`.

    Exact up to rounding; both ways of computing it are equal to rounding. Sengupta et al. (2023),
    "Manifold-Preserving Transformers are Effective for Short-Long Range Encoding", Theorem 1 and
    eq. 2, without their biases, which make the map's norm grow like sqrt d. Given sigma each token
    is mapped by itself: nothing else passes between tokens.

    Args:
        x: tokens, (batch, tokens, d), floating.
        left, right: U and V, (d, d); or (experts, d, d), all of which see the same x.
        sigma: spectrum, without unit: (d,) common to all; (batch, d); or (batch, tokens, d), one
            per token (causal).
        folded: multiply `U diag(sigma) V` out once per distinct sigma, d^3, which saves one product
            per token; None
            folds where that is cheaper: more than d tokens for each sigma. Per-token sigma is never
            folded.

    Returns:
        (batch, tokens, d), or (experts, batch, tokens, d). dtype of x.

    Raises:
        ShapeError: the shapes do not fit, or `folded` with a sigma per token.

    Cost: for each expert 2 N d^2 multiply-adds for N tokens, or N d^2 + d^3 per sigma when folded.
    When not to use: to let tokens exchange what they say; sigma is d numbers for a whole sequence.

    >>> x, u, v = torch.randn(2, 5, 4), torch.eye(4), torch.eye(4)
    >>> bool(torch.allclose(gram_attention(x, u, v, torch.ones(2, 4)), torch.nn.functional.elu(x)))
    True
    """
    _check_shapes(x, left, right, sigma)
    if folded is None:
        folded = folding_pays(x, sigma)
    elif folded and sigma.dim() == 3:
        raise ShapeError(
            f"gram_attention: sigma has shape {tuple(sigma.shape)}, one for each token; it cannot"
            " be folded"
        )
    if folded and sigma.dim() == 2:
        rows = sigma.expand(len(x), -1).unsqueeze(1)
        if left.dim() == 2:
            return F.elu(x @ ((left * rows) @ right))
        return F.elu(x @ ((left.unsqueeze(1) * rows) @ right.unsqueeze(1)))
    if folded:
        return F.elu(_project(x, (left * sigma) @ right))
    inner = _project(x, left) * per_token(sigma)
    flat = inner.view(*left.shape[:-2], -1, x.shape[-1])
    return F.elu((flat @ right).view(inner.shape))


def folding_pays(x: Tensor, sigma: Tensor) -> bool:
    """Whether more than d tokens share one sigma, so that d^3 for it costs less than d^2 for each
    token."""
    if sigma.dim() == 3:
        return False
    tokens = x.shape[-2] if sigma.dim() == 2 else x.shape[-2] * x.shape[0]
    return tokens > x.shape[-1]


def per_token(sigma: Tensor) -> Tensor:
    """Return sigma so that it multiplies tokens (batch, tokens, d)."""
    return sigma.unsqueeze(1) if sigma.dim() == 2 else sigma


def spectrum_fits(x: Tensor, sigma: Tensor) -> bool:
    """Whether x is (batch, tokens, d) and sigma a spectrum of it: (d,), (batch, d), (1, d) or
    (batch, tokens, d)."""
    return x.dim() == 3 and sigma.shape in (x.shape[2:], x.shape[::2], (1, x.shape[2]), x.shape)


def _project(x: Tensor, weight: Tensor) -> Tensor:
    """`x W` for one W, or for a stack of them in one batched product."""
    if weight.dim() == 2:
        return x @ weight
    flat = x.reshape(1, -1, x.shape[-1]).expand(len(weight), -1, -1)
    return torch.bmm(flat, weight).view(len(weight), *x.shape)


def _check_shapes(x: Tensor, left: Tensor, right: Tensor, sigma: Tensor) -> None:
    width = x.shape[-1] if x.dim() == 3 else -1
    square = (*left.shape[:-2], width, width)
    if spectrum_fits(x, sigma) and left.dim() in (2, 3) and left.shape == square == right.shape:
        return
    raise ShapeError(
        f"gram_attention: received x {tuple(x.shape)}, left {tuple(left.shape)}, right"
        f" {tuple(right.shape)}, sigma {tuple(sigma.shape)}; expected x (batch, tokens, d), left"
        " and right (d, d) or (experts, d, d), sigma (d,), (batch, d) or (batch, tokens, d)"
    )
