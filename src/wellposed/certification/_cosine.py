"""Scaled cosine attention with normalised values: Lipschitz everywhere, for any mask and across
sequences (B6)."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from wellposed.certification._attention import (
    TRAINING_DROPOUT,
    in_norm,
    norms,
    row_mass,
    weights_of,
)
from wellposed.certification._rules import LayerBound, Site, refuse_always, register_rule
from wellposed.errors import ConfigError
from wellposed.linalg import Bound, MaskKind, Norm, certified_spectral_norm, check_norm, least
from wellposed.nn import CosineCrossAttention, CosineSelfAttention


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
    output_norm: Tensor | None = None,
) -> Bound:
    """Return ``L >= Lip(nu softmax(tau n(x W_Q) . n(x W_K)) n(x W_V) W_O)``, where ``n(a) =
    a/sqrt(|a|^2 + eps)``.

    Certified on the whole space, for any mask that leaves no row empty (B6; after Qi et al., 2023,
    LipsFormer). tok: ``nu eps^-1/2 (|W_V| + tau |W_Q| + tau |W_K|)``; norm 2: ``nu eps^-1/2 (kP
    |W_V| + tau |W_Q| + tau kK |W_K|)`` with ``kP <= min(sqrt N, e^tau)`` under the full mask; inf:
    ``sqrt D`` times tok. Biases inside ``n`` are free.

    Args:
        query, key, value: ``(H, D, d)``, row convention ``x @ W_h``.
        output: ``W_O,h``, ``(H, d, E)``.
        eps: of the normalisation, > 0.
        temperature: tau, one number or one per head.
        value_scale: nu, one number or one per head.
        seq_len: at most this many tokens; only norm 2 depends on it.
        norm: ``"tok"``, ``"inf"`` or ``2``.
        mask: sharpens norm 2.
        output_norm: an upper bound of ``|W_O|``; computed where not given.

    Returns:
        `wellposed.linalg.Bound`, value in float64.

    Raises:
        ConfigError: ``eps <= 0`` (then there is no bound), or an unknown norm.

    >>> w = torch.eye(2).reshape(1, 2, 2)
    >>> round(float(cosine_attention_bound(w, w, w, w, eps=1.0, temperature=1.0, seq_len=9).value), 3)
    3.0
    """
    check_norm(norm)
    scales = {"eps": eps, "temperature": temperature, "value_scale": value_scale}
    terms = _terms(query, key, value, norm=norm, rows=seq_len, mask=mask, **scales)
    best = _joined(terms[0] + terms[1] + terms[2], output, norm, output_norm)
    if norm != "inf":
        return best
    return Bound(best.value * math.sqrt(query.shape[1]), f"sqrt(D) x ({best.form})")


def cosine_cross_attention_bounds(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    *,
    eps: float,
    temperature: Tensor | float,
    value_scale: Tensor | float = 1.0,
    num_queries: int,
    norm: Literal["tok", 2] = "tok",
) -> tuple[Bound, Bound]:
    """Return the bounds of cosine cross-attention with respect to the queries' sequence and to the
    memory (B6).

    Certified on the whole space for any mask that leaves no row empty. tok: ``nu eps^-1/2 tau
    |W_Q|`` and ``nu eps^-1/2 (|W_V| + tau |W_K|)``; norm 2: the second has ``sqrt(Nq) |W_V|`` and
    ``sqrt(Nq/2) tau |W_K|``. Moving
    both: their sum in tok, the root of the sum of squares in norm 2.

    Args:
        query: ``(H, D, d)``; ``key`` and ``value`` ``(H, E, d)`` act on the memory; ``output`` as
            there.
        num_queries: at most this many tokens of the queries' sequence; matters in norm 2.

    >>> w = torch.eye(2).reshape(1, 2, 2)
    >>> bounds = cosine_cross_attention_bounds(w, w, w, w, eps=1.0, temperature=3.0, num_queries=5)
    >>> [round(float(bound.value), 3) for bound in bounds]
    [3.0, 4.0]
    """
    # The number of memory tokens is free, so a row may attend to one token alone: the columns'
    # bound is sqrt(Nq).
    scales = {"eps": eps, "temperature": temperature, "value_scale": value_scale}
    terms = _terms(query, key, value, norm=norm, rows=num_queries, **scales)
    return _joined(terms[0], output, norm), _joined(terms[1] + terms[2], output, norm)


def _terms(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    eps: float,
    temperature: Tensor | float,
    value_scale: Tensor | float,
    norm: Norm,
    rows: int,
    mask: MaskKind = "any",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three terms of the Jacobian, of query, key and value, for each head."""
    if not eps > 0:
        raise ConfigError(
            f"cosine attention has a Lipschitz bound only for eps > 0, received eps={eps}"
        )
    tau = torch.as_tensor(temperature, dtype=torch.float64).detach().abs()
    scale = torch.as_tensor(value_scale, dtype=torch.float64).detach().abs() / math.sqrt(eps)
    mass = row_mass(rows, mask, float(tau.max())) if norm == 2 else 1.0
    key_mass = min(mass, math.sqrt(rows / 2)) if norm == 2 else 1.0
    by_key = key_mass * scale * tau * norms(key)
    return scale * tau * norms(query), by_key, mass * scale * norms(value)


def _joined(
    per_head: Tensor, output: Tensor, norm: Norm, through_output: Tensor | None = None
) -> Bound:
    if through_output is None:
        through_output = certified_spectral_norm(output.detach().flatten(0, 1), method="cholesky")
    together = through_output * per_head.square().sum().sqrt()
    apart = (per_head * norms(output)).sum()
    return least(
        [
            Bound(together, f"|W_O| sqrt(sum L_h^2), {norm} (B6)"),
            Bound(apart, f"sum L_h |W_O,h|, {norm} (B6)"),
        ]
    )


@register_rule(CosineSelfAttention)
def _cosine_self_attention(module: CosineSelfAttention, site: Site) -> LayerBound:
    if module.training and module.dropout > 0:
        return site.refuse(TRAINING_DROPOUT)
    weights = weights_of(module, site)
    # A temperature rounded in the module's dtype may exceed the exact exponential by a unit in the
    # last place.
    tau = module.log_tau.detach().double().exp() * (1 + 2 * torch.finfo(module.log_tau.dtype).eps)
    nu = module.nu.detach().double()
    bound = partial(
        cosine_attention_bound,
        weights.query,
        weights.key,
        weights.value,
        weights.output,
        eps=module.eps,
        temperature=tau,
        value_scale=nu,
        seq_len=site.seq_len,
        mask=site.mask,
        output_norm=weights.output_norm,
    )
    # Each head's output is an average of vectors shorter than nu, whatever comes in.
    spread = min(weights.output_norm * nu.norm(), (norms(weights.output) * nu.abs()).sum())
    out_radius = float(spread + weights.output_bias.norm())
    return in_norm(
        bound(norm="tok"), partial(bound, norm=2), site, module.embed_dim, out_radius=out_radius
    )


refuse_always(
    "cross-attention has two inputs; bound them with"
    " wellposed.certification.cosine_cross_attention_bounds",
    CosineCrossAttention,
)
