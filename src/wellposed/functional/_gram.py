"""TransJect's attention: mixes tokens by the spectrum of their Gram matrix, in linear time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.errors import ShapeError


def gram_attention(
    x: Tensor, left: Tensor, right: Tensor, sigma: Tensor, *, folded: bool | None = None
) -> Tensor:
    """Return `ELU((x U * sigma) V)`, 1-Lipschitz in x for orthogonal U, V and `|sigma| <= 1`.

    Status: exact up to rounding, folded or not. Source: Sengupta et al. (2023),
    "Manifold-Preserving Transformers are Effective for Short-Long Range Encoding", Theorem 1 and
    eq. 2, without their biases, which make the map's norm grow like sqrt d.

    Args:
        x: tokens, (batch, tokens, d), floating; the result has its dtype, and experts in front.
        left: U, (d, d); or (experts, d, d), all of which read the same x.
        right: V, of the same shape.
        sigma: spectrum, no unit: (d,) shared, (batch, d), or (batch, tokens, d), causal.
        folded: compute `U diag(sigma) V` once per sigma (not per token); None: if that is cheaper.

    Raises:
        ShapeError: the shapes do not fit, or `folded` with a sigma per token.

    Cost: per expert 2 N d^2 multiply-adds for N tokens, or N d^2 + d^3 per sigma if folded. When
    not to use: to pass content between tokens; given sigma, each token is mapped by itself.

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
    """Return whether more than d tokens share a sigma: d^3 is then less than d^2 for each token."""
    if sigma.dim() == 3:
        return False
    tokens = x.shape[-2] if sigma.dim() == 2 else x.shape[-2] * x.shape[0]
    return tokens > x.shape[-1]


def per_token(sigma: Tensor) -> Tensor:
    """Return sigma so that it multiplies tokens (batch, tokens, d)."""
    return sigma.unsqueeze(1) if sigma.dim() == 2 else sigma


def check_spectrum(where: str, x: Tensor, sigma: Tensor, *, each_token: bool = True) -> None:
    """Raise `ShapeError` unless x is (batch, tokens, d) and sigma has a shape that fits it."""
    shapes = (x.shape[2:], x.shape[::2], (1, x.shape[-1]), *([x.shape] if each_token else []))
    if x.dim() != 3 or sigma.shape not in shapes:
        alternative = (
            " or (batch, tokens, d)" if each_token else "; one for each token needs is_causal=True"
        )
        raise ShapeError(
            f"{where}: received x {tuple(x.shape)} and sigma {tuple(sigma.shape)}; expected x"
            f" (batch, tokens, d) and sigma (d,), (batch, d){alternative}"
        )


def _project(x: Tensor, weight: Tensor) -> Tensor:
    if weight.dim() == 2:
        return x @ weight
    # (..., T, in) and (H, in, d) -> (H, rows, in) and (H, ..., T, d)
    flat = x.reshape(1, -1, x.shape[-1]).expand(len(weight), -1, -1)
    return torch.bmm(flat, weight).view(len(weight), *x.shape)
