"""Scaled cosine attention with normalised values: Lipschitz everywhere, for any mask and across sequences (B6)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wellposed.certification._heads import norms, row_mass
from wellposed.errors import ConfigError
from wellposed.linalg import Bound, MaskKind, Norm, certified_spectral_norm, check_norm, least


def cosine_attention_bound(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    *,
    eps: float,
    temperature: Tensor | float,
    value_scale: Tensor | float = 1.0,
    seq_len: int,
    norm: Norm = "tok",
    mask: MaskKind = "any",
) -> Bound:
    """Return ``L >= Lip(nu softmax(tau n(x W_Q) . n(x W_K)) n(x W_V) W_O)``, where ``n(a) = a/sqrt(|a|^2 + eps)``.

    Certified on the whole space, for any mask that leaves no row empty (B6; after Qi et al., 2023, LipsFormer). tok:
    ``nu eps^-1/2 (|W_V| + tau |W_Q| + tau |W_K|)``; norm 2: ``nu eps^-1/2 (kP |W_V| + tau |W_Q| + tau kK |W_K|)`` with
    ``kP <= min(sqrt N, e^tau)`` under the full mask; inf: ``sqrt D`` times tok. Biases inside ``n`` are free.

    Args:
        query, key, value: ``(H, D, d)``, row convention ``x @ W_h``.
        output: ``W_O,h``, ``(H, d, E)``.
        eps: of the normalisation, > 0.
        temperature: tau, one number or one per head.
        value_scale: nu, one number or one per head.
        seq_len: at most this many tokens; only norm 2 depends on it.
        norm: ``"tok"``, ``"inf"`` or ``2``.
        mask: sharpens norm 2.

    Returns:
        `wellposed.linalg.Bound`, value in float64.

    Raises:
        ConfigError: ``eps <= 0`` (then there is no bound), or an unknown norm.

    >>> w = torch.eye(2).reshape(1, 2, 2)
    >>> round(float(cosine_attention_bound(w, w, w, w, eps=1.0, temperature=1.0, seq_len=9).value), 3)
    3.0
    """
    check_norm(norm)
    if not eps > 0:
        raise ConfigError(f"cosine attention has a Lipschitz bound only for eps > 0, received eps={eps}")
    tau = torch.as_tensor(temperature, dtype=torch.float64).detach().abs()
    nu = torch.as_tensor(value_scale, dtype=torch.float64).detach().abs()
    by_query, by_key, by_value = norms(query), norms(key), norms(value)
    mass, key_mass = 1.0, 1.0
    if norm == 2:
        mass = row_mass(seq_len, mask, float(tau.max()))
        key_mass = min(mass, math.sqrt(seq_len / 2))
    per_head = nu / math.sqrt(eps) * (mass * by_value + tau * by_query + key_mass * tau * by_key)
    through_output = certified_spectral_norm(output.detach().flatten(0, 1))
    bounds = [
        Bound(through_output * per_head.square().sum().sqrt(), f"|W_O| sqrt(sum L_h^2), {norm} (B6)"),
        Bound((per_head * norms(output)).sum(), f"sum L_h |W_O,h|, {norm} (B6)"),
    ]
    best = least(bounds)
    return Bound(best.value * math.sqrt(query.shape[1]), f"sqrt(D) x ({best.form})") if norm == "inf" else best
