"""L2 self-attention: kim2021's printed bounds, kept to be compared against (theory note B1, B2).

The bounds in use are `wellposed.linalg.l2_attention_bound`.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from wellposed.linalg import certified_spectral_norm, infinity_norm, kim_bracket


def kim2021_bound(
    projection: Tensor,
    value: Tensor,
    output: Tensor,
    *,
    seq_len: int,
    norm: Literal["inf", 2],
    as_printed: bool = False,
) -> Tensor:
    """Return Theorem 3.2 of Kim, Papamakarios, Mnih (2021) for tied L2 attention with ``A_h = W_h W_h^T / sqrt d``.

    ``inf``: ``(4c + 1/sqrt d) max|W_h|_inf |W_h^T|_inf max|W_V,h^T|_inf |W_O^T|_inf``, certified.
    ``2``: ``sqrt(N/d) (4c + 1) sqrt(sum |W_h|^4 |W_V,h|^2) |W_O|``, certified. With ``as_printed`` the fourth power is
    the second, as in the paper: that is a slip, and **no upper bound** (the map is quadratic in ``W_h``).

    Args:
        projection, value: ``W_h`` and ``W_V,h``, ``(H, D, d)``.
        output: ``W_O``, ``(H d, E)``.
        seq_len: number of tokens N.

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
    spectral, values = certified_spectral_norm(projection), certified_spectral_norm(value)
    return bracket * (spectral.pow(power) * values.square()).sum().sqrt() * certified_spectral_norm(output)


def kim2021_mixing(projection: Tensor, value: Tensor) -> Tensor:
    """Return ``R_h = W_h^T W_V,h / sqrt d``, the paper's value map in terms of ``z = x W_h``: ``(H, d, d)``.

    >>> import torch
    >>> kim2021_mixing(torch.eye(4).reshape(1, 4, 4), torch.eye(4).reshape(1, 4, 4))[0, 0, 0]
    tensor(0.5000)
    """
    return projection.mT @ value / math.sqrt(projection.shape[-1])
