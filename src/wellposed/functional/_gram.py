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
    check_spectrum("gram_attention", x, sigma)
    square = (*left.shape[:-2], x.shape[-1], x.shape[-1])
    if left.dim() not in (2, 3) or not left.shape == square == right.shape:
        raise ShapeError(
            f"gram_attention: received left {tuple(left.shape)} and right {tuple(right.shape)} for"
            f" x {tuple(x.shape)}; expected (d, d) or (experts, d, d)"
        )
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


def check_spectrum(where: str, x: Tensor, sigma: Tensor, *, each_token: bool = True) -> None:
    """Raise `ShapeError` where x is not (batch, tokens, d), or sigma no spectrum of it: (d,),
    (batch, d), (1, d) or, ``each_token``, (batch, tokens, d)."""
    shapes = (x.shape[2:], x.shape[::2], (1, x.shape[-1]), *([x.shape] if each_token else []))
    if x.dim() != 3 or sigma.shape not in shapes:
        own = (
            " or (batch, tokens, d)" if each_token else "; one for each token needs is_causal=True"
        )
        raise ShapeError(
            f"{where}: received x {tuple(x.shape)} and sigma {tuple(sigma.shape)}; expected x"
            f" (batch, tokens, d) and sigma (d,), (batch, d){own}"
        )


def _project(x: Tensor, weight: Tensor) -> Tensor:
    """`x W` for one W, or for a stack of them in one batched product."""
    if weight.dim() == 2:
        return x @ weight
    flat = x.reshape(1, -1, x.shape[-1]).expand(len(weight), -1, -1)
    return torch.bmm(flat, weight).view(len(weight), *x.shape)
