"""Spectral norm of the softmax Jacobian of attention: exactly, and as a penalty (JaSMin)."""

from __future__ import annotations

import torch
from torch import Tensor

from wellposed.errors import ShapeError
from wellposed.functional._diagnostics import probability_rows, softmax_sensitivity
from wellposed.functional._masks import MASKED_ROW, unattended
from wellposed.functional._self_attention import closed_logits, self_attention_of

_HALVINGS = 60


def softmax_jacobian_norm(probabilities: Tensor) -> Tensor:
    """Return ``|diag p - p p^T|_2`` of every row p, the spectral norm of its softmax's Jacobian.

    Status: exact up to rounding (1e-7 in float32, 1e-15 in float64), without gradient. It is the root
    of ``sum_i p_i / (p_i - x)`` between the two largest probabilities (eigenvalues of a diagonal
    matrix less one of rank one interlace), found by bisection. `softmax_sensitivity` is the upper
    bound ``p1 (1 - p1 + p2)``, which has a gradient.
    Source: Golub 1973 (the secular equation); Yudin et al. 2025 (arXiv 2507.07814) for its use.

    Args:
        probabilities: ``(..., queries, keys)``, rows not negative with sum 1; the result drops keys.

    Raises:
        ShapeError: no key, or a scalar.

    Cost: 60 passes over the matrix. When not to use: in a step; use `softmax_sensitivity`.

    >>> norms = softmax_jacobian_norm(torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]))
    >>> [round(norm, 6) for norm in norms.tolist()]
    [0.5, 0.0]
    """
    rows = probability_rows(probabilities).detach()
    first, index = rows.max(-1, keepdim=True)
    others = rows.scatter(-1, index, 0.0)
    low = others.amax(-1, keepdim=True)
    high = first.clone()
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        # Above the root the largest probability outweighs all others: p1/(p1 - x) > sum p/(x - p).
        rest = torch.where(others > 0, others / (middle - others), 0.0).sum(-1, keepdim=True)
        is_above = first > rest * (first - middle)
        high = torch.where(is_above, middle, high)
        low = torch.where(is_above, low, middle)

    return high[..., 0]


def softmax_norm_penalty(
    query: Tensor,
    key: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return the mean over queries of ``p1 (1 - p1 + p2)``, A = softmax(scale Q K^T), per head, (...).

    Status: a penalty; exact to rounding, in at least float32. It bounds the mean spectral norm of the
    softmax Jacobian, so that a small one means attention that reacts little to its logits: saturated
    or spread rows. Rows of padded tokens, and rows without keys, are left out, as `affinity_penalty`
    says.
    Source: the quantity of JaSMin (Yudin et al. 2025, arXiv 2507.07814); that it is averaged over rows
    is ours.

    Args:
        query: as in `affinity_penalty`.
        key: as in `affinity_penalty`.
        attn_mask: as in `affinity_penalty`.
        is_causal: as in `affinity_penalty`.
        key_padding_mask: as in `affinity_penalty`.
        scale: of the logits; default ``1/sqrt(D)``.

    Raises:
        ShapeError: query and key differ in tokens or width. ConfigError: float16 on a CPU.

    Cost: the logits of one attention, in O(N^2) memory. When not to use: for long sequences, whose
    logits do not fit; there is no estimate by probes.

    >>> x = torch.zeros(4, 4)  # A = 1/4 everywhere: 1/4 (1 - 1/4 + 1/4)
    >>> softmax_norm_penalty(x, x).item()
    0.25
    """
    attention = self_attention_of(
        "softmax_norm_penalty",
        query,
        key,
        attn_mask=attn_mask,
        is_causal=is_causal,
        key_padding_mask=key_padding_mask,
        scale=scale,
    )
    with torch.autocast(query.device.type, enabled=False):
        logits = closed_logits(*attention)
        return _mean_bound(logits, attention.masks.left_out).reshape(query.shape[:-2])


def softmax_norm_penalty_from_logits(logits: Tensor) -> Tensor:
    """Return `softmax_norm_penalty` of masked and scaled logits (..., N, N), per head, (...).

    Status and source: as there. Rows of tokens that get no weight from any query are left out, as
    `unattended` says, and rows that are masked as a whole.

    Args:
        logits: masked and scaled, (..., N, N), floating.

    Raises:
        ShapeError: the logits are not square.

    Cost: three passes over the logits. When not to use: if query and key are available.

    >>> softmax_norm_penalty_from_logits(torch.zeros(4, 4)).item()
    0.25
    """
    if logits.ndim < 2 or logits.shape[-1] != logits.shape[-2]:
        shape = tuple(logits.shape)
        raise ShapeError(
            f"softmax_norm_penalty_from_logits: expected (..., N, N), received {shape}"
        )
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return _mean_bound(wide, unattended(logits, torch.float64))


def _mean_bound(logits: Tensor, left_out: Tensor | None) -> Tensor:
    """Return the mean bound over the rows that have a key."""
    empty = logits.detach().amax(dim=-1) <= MASKED_ROW
    if left_out is not None:
        empty = empty | left_out
    rows = logits.masked_fill(empty[..., None], 0.0).softmax(dim=-1)
    bounds = softmax_sensitivity(rows).masked_fill(empty, 0.0)
    return bounds.sum(-1) / (~empty).sum(-1).clamp_min(1)
