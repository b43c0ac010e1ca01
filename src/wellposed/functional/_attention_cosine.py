"""Scaled cosine attention: Lipschitz for any mask, and between two different sequences."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from wellposed.errors import ConfigError
from wellposed.functional.as_dot_product import check_attention_inputs, normalized_vectors


def cosine_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    eps: float = 0.01,
    tau: float | Tensor = 1.0,
    nu: float | Tensor = 1.0,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    r"""Row i is `nu sum_j p_ij n(v_j)`, `p_ij = softmax_j(tau n(q_i) . n(k_j))`, with
    `n(a) = a / sqrt(|a|^2 + eps)`.

    Exact up to rounding. Every row has norm below `nu`, and, since `n` has slope at most `eps^-1/2`
    and norm below 1,
    the map is globally Lipschitz for every mask and from each of its three arguments: with `|dq|`
    the largest change of a query, `|df_i| <= nu eps^-1/2 (|dv| + tau |dq| + tau |dk|)` (in the max
    over tokens of the 2-norm). Qi et al. (2023), "LipsFormer", with the constant re-derived (theory
    note B6).

    Args:
        query: (..., queries, head_dim).
        key: (..., keys, head_dim).
        value: (..., keys, value_dim); normalised as well: with a plain value no bound exists.
        eps: > 0, a real knob and not a guard against 0/0: the slope at the origin is `eps^-1/2`.
        tau: temperature, > 0; a tensor broadcasts to (..., queries, 1) and may be learnt, per head
            for example.
        nu: scale of the output; a tensor broadcasts to (..., queries, value_dim).
        attn_mask: as in `scaled_dot_product_attention`. The token itself need not be seen. A row
            without any key returns zero.
        is_causal: query i sees keys j <= i.
        dropout_p: probability of dropping an attention weight; the bound above is for 0.

    Returns:
        (..., queries, value_dim).

    Raises:
        ConfigError: `eps`, or a `tau` that is a number, is not positive.
        ShapeError: the widths of query and key, or the number of keys and values, differ.

    Cost: one `scaled_dot_product_attention` and three norms. Norms are computed in float32 at
    least.

    >>> import torch
    >>> x = 1e6 * torch.randn(3, 4)
    >>> bool(cosine_attention(x, x, x).norm(dim=-1).max() <= 1 + 1e-6)
    True
    """
    if not eps > 0:
        raise ConfigError(
            f"cosine_attention: eps is {eps}; expected > 0, since the Lipschitz constant is"
            " eps^-1/2"
        )
    if not isinstance(tau, Tensor) and not tau > 0:
        raise ConfigError(f"cosine_attention: tau is {tau}; expected a positive temperature")
    check_attention_inputs("cosine_attention", (query, key, value), attn_mask)
    query, key, value = (normalized_vectors(tokens, eps) for tokens in (query, key, value))
    # A learnt temperature must stay a tensor, while the fused kernel takes a number.
    scale = 1.0 if isinstance(tau, Tensor) else tau
    query = (query * tau).to(key.dtype) if isinstance(tau, Tensor) else query
    seen = {"attn_mask": attn_mask, "is_causal": is_causal}
    joined = F.scaled_dot_product_attention(
        query, key, value, **seen, dropout_p=dropout_p, scale=scale
    )
    return (nu * joined).to(joined.dtype)
