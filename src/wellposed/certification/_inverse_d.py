"""Attention with logits scaled by 1/d: 1-Lipschitz for one head, not for several (theory note B7)."""

from __future__ import annotations

import math

from wellposed.errors import ConfigError


def inverse_d_attention_bound(
    num_heads: int, *, output_norm: float = 1.0, logit_scale: float = 1.0, input_rms: float = 1.0
) -> float:
    """Return ``|W_O|/3 (1 + 2 s a^2)`` for one head, ``|W_O|/3 (sqrt H + 2 s H a^2)`` for H (B7).

    Certified, in the norm "largest root mean square of a token", for ``(1/3) softmax(s q . k / d) v`` per head with the
    D x D maps of query, key and value of RMS norm at most 1 and tokens of RMS at most ``a``; any mask; rotary positions
    are fine. Large et al. (2024) and Newhouse et al. (2025) take 1 for every H: that holds for H = 1 only, and the true
    constant is at least ``(1 + H)/3``. Logits over the model width (``s = 1/H``) give ``(sqrt H + 2 a^2)/3``.

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
        raise ConfigError(f"inverse_d_attention_bound: num_heads must be >= 1, received {num_heads}")
    return output_norm / 3 * (math.sqrt(num_heads) + 2 * abs(logit_scale) * num_heads * input_rms**2)
