"""The bound that Kim, Papamakarios, Mnih (2021) print for L2 self-attention."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from wellposed.linalg._l2_constants import kim_bracket
from wellposed.linalg._norms import SpectralMethod, certified_spectral_norm, infinity_norm


def kim2021_bound(
    projection: Tensor,
    value: Tensor,
    output: Tensor,
    *,
    seq_len: int,
    norm: Literal["inf", 2],
    as_printed: bool = False,
    method: SpectralMethod = "svd",
) -> Tensor:
    """Return Theorem 3.2 of Kim, Papamakarios, Mnih (2021) for tied L2 attention with ``A_h = W_h
    W_h^T / sqrt d``.

    ``inf``: ``(4c + 1/sqrt d) max|W_h|_inf |W_h^T|_inf max|W_V,h^T|_inf |W_O^T|_inf``, certified.
    ``2``: ``sqrt(N/d) (4c + 1) sqrt(sum |W_h|^4 |W_V,h|^2) |W_O|``, certified. With ``as_printed``
    the fourth power is
    the second, as in the paper: that is a slip, and **no upper bound** (the map is quadratic in
    ``W_h``).

    Args:
        projection, value: ``W_h`` and ``W_V,h``, ``(H, D, d)``.
        output: ``W_O``, ``(H d, E)``.
        seq_len: number of tokens N.
        norm: ``"inf"`` or ``2``; the paper has no other.
        as_printed: with the slip.
        method: how spectral norms are bounded; ``"gram"`` is differentiable.

    Returns:
        0-dim float64 tensor. `wellposed.linalg.l2_attention_bound` is never larger; use that.

    >>> import torch
    >>> one, ten = torch.ones(1, 1, 1), torch.full((1, 1, 1), 10.0)
    >>> round(float(kim2021_bound(ten, one, one[0], seq_len=2, norm=2)), 2)
    298.95
    >>> round(float(kim2021_bound(ten, one, one[0], seq_len=2, norm=2, as_printed=True)), 2)
    29.89
    """
    bracket = kim_bracket(seq_len, norm=norm, head_dim=projection.shape[-1])
    if norm == "inf":
        square = infinity_norm(projection) * infinity_norm(projection.mT)
        return bracket * square.amax() * infinity_norm(value.mT).amax() * infinity_norm(output.mT)
    power = 2 if as_printed else 4
    spectral, values = (
        certified_spectral_norm(weight, method=method) for weight in (projection, value)
    )
    return (
        bracket
        * (spectral.pow(power) * values.square()).sum().sqrt()
        * certified_spectral_norm(output, method=method)
    )
