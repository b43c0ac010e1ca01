"""Bounds of the papers and of the theory that no rule of `certify` uses, to compare against and to
look at models with.

The value map of Kim et al. (2021) (B1 to B4; `wellposed.linalg` has their bound), what a
dot-product head does at one input (B5), logits scaled by 1/d (B7), and how far one row of softmax
attention can move (B10, B11).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wellposed.errors import ConfigError, ShapeError
from wellposed.linalg import certified_spectral_norm


def kim2021_mixing(projection: Tensor, value: Tensor) -> Tensor:
    """Return ``R_h = W_h^T W_V,h / sqrt d``, the paper's value map in terms of ``z = x W_h``: ``(H,
    d, d)``.

    >>> import torch
    >>> kim2021_mixing(torch.eye(4).reshape(1, 4, 4), torch.eye(4).reshape(1, 4, 4))[0, 0, 0]
    tensor(0.5000)
    """
    return projection.mT @ value / math.sqrt(projection.shape[-1])


def local_dot_product_bound(
    x: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_bias: Tensor | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """Return ``|W_V| (|P|_2 + max_i |Cov_i A|_2 + |S|_2) >= |D f(X)|_2`` for one head at one input
    (B5).

    A *pointwise* bound of the Jacobian in norm 2, with ``S_ij = P_ij |x_j - xbar_i| |A x_i|``: a
    diagnostic or a regulariser, **not** a certificate around X (that would need its supremum over a
    ball).

    Args:
        x: ``(N, D)`` input.
        query, key, value: ``(D, d)``, row convention ``x @ W``.
        query_bias: ``(d,)``.
        allowed: bool ``(N, N)``, True = may attend.

    Returns:
        0-dim tensor, differentiable.

    Raises:
        ShapeError: the shapes do not fit, or a row allows no key.

    Cost: O(N D^2 + N^2 D) and one eigenvalue problem per token.

    >>> x, w = torch.zeros(3, 2), torch.eye(2)
    >>> round(float(local_dot_product_bound(x, w, w, w)), 4)
    1.0
    """
    if (
        x.ndim != 2
        or query.shape != key.shape
        or query.shape[0] != x.shape[1]
        or value.shape[0] != x.shape[1]
    ):
        shapes = ", ".join(str(tuple(t.shape)) for t in (x, query, key, value))
        raise ShapeError(
            f"local bound: expected x (N, D) and query, key, value (D, d); received {shapes}"
        )
    pull = (
        (x @ query + (0 if query_bias is None else query_bias)) @ key.mT / math.sqrt(query.shape[1])
    )
    logits = pull @ x.mT
    if allowed is not None:
        if not bool(allowed.any(-1).all()):
            raise ShapeError(
                "local bound: a row of the mask allows no key; let each token attend to itself"
            )
        logits = logits.masked_fill(~allowed, -math.inf)
    weights = logits.softmax(-1)
    deviation = x[None] - (weights @ x)[:, None]
    covariance = torch.einsum("ij,ijk,ijl->ikl", weights, deviation, deviation)
    affinity = key @ query.mT / math.sqrt(query.shape[1])
    spread = weights * deviation.norm(dim=-1) * pull.norm(dim=-1, keepdim=True)
    parts = (weights, covariance @ affinity, spread, value)
    averaging, by_query, by_key, out = (certified_spectral_norm(part) for part in parts)
    return out * (averaging + by_query.amax() + by_key)


def inverse_d_attention_bound(
    num_heads: int, *, output_norm: float = 1.0, logit_scale: float = 1.0, input_rms: float = 1.0
) -> float:
    """Return ``|W_O|/3 (1 + 2 s a^2)`` for one head, ``|W_O|/3 (sqrt H + 2 s H a^2)`` for H (B7).

    Certified, in the norm "largest root mean square of a token", for ``(1/3) softmax(s q . k / d)
    v`` per head with the D x D maps of query, key and value of RMS norm at most 1 and tokens of RMS
    at most ``a``; any mask; rotary positions are fine. Large et al. (2024) and Newhouse et al.
    (2025) take 1 for every H: that holds for H = 1 only, and the true constant is at least ``(1 +
    H)/3``. Logits over the model width (``s = 1/H``) give ``(sqrt H + 2 a^2)/3``.

    Args:
        num_heads: H >= 1.
        output_norm: RMS to RMS norm of the output map.
        logit_scale: ``s`` where logits are ``s q . k / d`` with d the head width.
        input_rms: largest RMS ``a`` of an input token.

    Raises:
        ConfigError: ``num_heads < 1``.

    >>> inverse_d_attention_bound(1), round(inverse_d_attention_bound(4), 3)
    (1.0, 3.333)
    """
    if num_heads < 1:
        raise ConfigError(
            f"inverse_d_attention_bound: num_heads must be >= 1, received {num_heads}"
        )
    return (
        output_norm / 3 * (math.sqrt(num_heads) + 2 * abs(logit_scale) * num_heads * input_rms**2)
    )


def affinity_perturbation_bound(key: Tensor, query_change: Tensor, *, scale: float) -> Tensor:
    """Return ``min(sqrt 2, 1/2 scale |K - 1 kbar^T|_2 |eps|) >= |A'_i - A_i|``: query noise
    ``eps``, keys fixed (B11).

    Certified. Zhang et al. (2021), Theorem 2.1, with the constant 1/2 in place of 2 (softmax is
    1/2-Lipschitz in the 2-norm, Gao and Pavel 2017) and the keys centred (softmax ignores a common
    shift). Tight for two opposite keys.

    Args:
        key: ``(..., n, d)``.
        query_change: ``(..., m, d)``, the perturbation of each query.
        scale: factor of the logits, usually ``1/sqrt(d)``.

    Returns:
        ``(..., m)``. Only the queries move: in self-attention the keys move too, and no such bound
        exists off a ball.

    >>> float(affinity_perturbation_bound(torch.zeros(3, 2), torch.ones(1, 2), scale=1.0))
    0.0
    """
    centred = key - key.mean(-2, keepdim=True)
    size = certified_spectral_norm(centred).to(query_change.dtype)
    moved = 0.5 * abs(scale) * size.unsqueeze(-1) * query_change.norm(dim=-1)
    return moved.clamp_max(2**0.5)
