"""How far attention affinities are from orthogonal: exactly, or by an unbiased O(N) estimate.

Shapes: B batch, H heads, N tokens, D head_dim; A = softmax(scale Q K^T + mask): (B, H, N, N).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from wellposed.errors import ConfigError, ShapeError
from wellposed.functional._masks import unattended
from wellposed.functional._self_attention import Masks, closed_logits, self_attention_of
from wellposed.second_derivatives import attend, with_graph
from wellposed.torch_modes import is_transformed

Estimator = Literal["exact", "probes"]
_CHUNK = 1 << 25  # elements of A in memory at a time (exact)
_BLOCKED = 1e4  # subtracted from the logits of padded keys if a mask would cost N x N


def affinity_penalty(
    query: Tensor,
    key: Tensor,
    *,
    estimator: Estimator = "exact",
    num_probes: int = 32,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return ``|A^T A - I|_F^2`` of ``A = softmax(scale Q K^T)`` per head, (...), at least float32.

    Status: a penalty; ``exact`` to rounding, ``probes`` an unbiased estimate. It is zero if and
    only if A is a permutation. Rows and columns of padded tokens are removed. A token is padded if
    ``key_padding_mask`` marks it or if ``attn_mask`` leaves it no weight in any row, as
    `unattended` says. Rows without keys are zero.

    Source: Zhang et al. (2021, sec. 2.2), as printed. ``exact`` is ``|A A^T|_F^2 - 2 |A|_F^2 + N``.
    With independent sign matrices U, V of n columns, ``probes`` replaces ``|A^T A|_F^2`` by
    ``|(A U)^T (A V)|_F^2 / n^2`` and ``|A|_F^2`` by ``|A U|_F^2 / n``.

    Args:
        query: shape (batch, heads, N, D), (batch, N, D) or (N, D); floating point.
        key: the same shape. With grouped heads, the number of its heads divides the query's.
        estimator: ``"exact"`` or ``"probes"``.
        num_probes: n. The standard deviation falls like 1/sqrt(n) or faster.
        attn_mask: broadcastable to (..., N, N); bool (True = may attend) or added to the logits.
        is_causal: token i attends to tokens up to i.
        key_padding_mask: (batch, N): bool, True = padding; or floating point, added to the logits
            of its key, as torch does.
        scale: of the logits; default ``1/sqrt(D)``.
        generator: source of U and V.

    Raises:
        ShapeError: query and key differ in tokens or width (cross-attention has no square
            affinity).
        ConfigError: unknown estimator, fewer than one probe, or float16 on a CPU.

    Cost: ``exact`` 6 N^3 FLOPs per head with its gradient, and O(N^2) memory of one batch chunk.
    Its second derivatives form the gradient again, by autograd. ``probes`` one attention with 2 n
    value columns, in O(N) memory without ``attn_mask``. When not to use: ``probes`` for small N.

    >>> x = 100 * torch.eye(4)  # every token attends to itself
    >>> affinity_penalty(x, x).item(), affinity_penalty(x * 0, x).item()  # A = I, and A = 1/4
    (0.0, 3.0)
    """
    _check_estimator(estimator, num_probes)
    attention = self_attention_of(
        "affinity_penalty",
        query,
        key,
        attn_mask=attn_mask,
        is_causal=is_causal,
        key_padding_mask=key_padding_mask,
        scale=scale,
    )
    with torch.autocast(query.device.type, enabled=False):
        if estimator == "exact":
            value = _exactly(attention.query, attention.key, attention.masks)
        else:
            value = _probes(attention.query, attention.key, attention.masks, num_probes, generator)

    return value.reshape(query.shape[:-2])


def affinity_penalty_from_logits(logits: Tensor) -> Tensor:
    """Return ``|A^T A - I|_F^2`` of ``A = softmax(logits)`` per head, shape (...), at least
    float32.

    Status, method and source: `affinity_penalty` with ``estimator="exact"``. A token is padded if
    it gets no weight from any query, even in float64: `unattended` of the logits. Any mask will do
    that an eager model adds, as -1e4. So does a token that all queries, its own included, neglect
    by 745.

    Args:
        logits: masked and scaled, shape (..., N, N), floating point.

    Raises:
        ShapeError: the logits are not square.

    Cost: 6 N^3 FLOPs per head with its gradient; extra memory twice the logits. When not to use: if
    query and key are available, `affinity_penalty` needs less memory.

    >>> affinity_penalty_from_logits(torch.zeros(4, 4)).item()  # A = 1/4 everywhere
    3.0
    """
    if logits.ndim < 2 or logits.shape[-1] != logits.shape[-2]:
        raise ShapeError(
            f"affinities of self-attention are square; received shape {tuple(logits.shape)}"
        )

    *lead, tokens, _ = logits.shape
    bias = logits.reshape(-1, 1, tokens, tokens)
    wide = torch.promote_types(logits.dtype, torch.float32)
    # Products of width 0 add nothing.
    nothing = bias.new_empty((len(bias), 1, tokens, 0), dtype=wide)
    # In float64, so that sharp attention of a narrower dtype is not taken for a mask.
    top = bias.detach().amax(dim=-1, keepdim=True)
    left_out = unattended(bias, torch.float64, top=top)
    masks = Masks(1.0, None, bias, None, left_out, is_causal=False, top=top)
    with torch.autocast(logits.device.type, enabled=False):
        return _exactly(nothing, nothing, masks).reshape(lead)


class _Exact(torch.autograd.Function):
    """Value per head; the forward pass forms the gradient, so no N x N tensor outlives a chunk."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, bias: Tensor | None, masks: Masks) -> Tensor:
        batch, heads, tokens, _ = query.shape
        dtype = torch.promote_types(query.dtype, torch.float32)
        need_query, need_key, need_bias = ctx.needs_input_grad[:3]
        values: list[Tensor] = []
        grads: dict[str, list[Tensor]] = {"query": [], "key": [], "bias": []}
        step = max(1, _CHUNK // max(1, heads * tokens * tokens))
        for start in range(0, batch, step):
            q = query[start : start + step].to(dtype)
            k = key[start : start + step].to(dtype)
            part = masks.chunk(start, start + step)
            scores = (q * masks.scale) @ k.mT
            closed = part.closed(q)
            if part.bias is not None:
                scores += part.bias
            if closed is not None:
                scores.masked_fill_(closed, -torch.inf)
            value, upstream = _value_and_gradient(scores, part, any(ctx.needs_input_grad[:3]))
            values.append(value)
            if upstream is None:
                continue
            if need_query:
                grads["query"].append((upstream @ k).mul_(masks.scale).to(query.dtype))
            if need_key:
                grads["key"].append((upstream.mT @ q).mul_(masks.scale).to(key.dtype))
            if need_bias:
                grads["bias"].append(upstream)

        slopes = (torch.cat(parts) if parts else None for parts in grads.values())
        ctx.save_for_backward(*slopes, query, key, bias)
        ctx.masks = masks
        ctx.bias_shape = None if bias is None else bias.shape
        return torch.cat(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weight = grad[..., None, None]
        *saved, query, key, bias = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *with_graph(partial(_plain, masks=ctx.masks), (query, key, bias), grad), None
        slopes = (None if part is None else part * weight.to(part.dtype) for part in saved)
        by_query, by_key, by_bias = slopes
        if by_bias is not None:
            by_bias = by_bias.sum_to_size(ctx.bias_shape)
        return by_query, by_key, by_bias, None


def _exactly(query: Tensor, key: Tensor, masks: Masks) -> Tensor:
    """Return the value of each head, with a gradient, also in transforms of `torch.func`."""
    if is_transformed():
        return _plain(query, key, masks.bias, masks)
    return _Exact.apply(query, key, masks.bias, masks)  # type: ignore[return-value]


def _plain(query: Tensor, key: Tensor, bias: Tensor | None, masks: Masks) -> Tensor:
    """Return the value of `_Exact` for all chunks at once, in operations that autograd supports."""
    scores = closed_logits(query, key, replace(masks, bias=bias))
    return _value_and_gradient(scores, masks, gradient=False)[0]


def _value_and_gradient(
    logits: Tensor, masks: Masks, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the value of `_Exact`, and its gradient by ``logits``, which is overwritten."""
    if masks.left_out is None:
        affinity = logits.softmax(dim=-1)
    else:
        top = logits.amax(dim=-1, keepdim=True) if masks.top is None else masks.top
        rows = masks.left_out[..., None] | top.isneginf()
        affinity = logits.masked_fill_(rows, 0).softmax(dim=-1)
        # With gradients on, autograd keeps the softmax: do not change it in place.
        fill = Tensor.masked_fill if torch.is_grad_enabled() else Tensor.masked_fill_
        affinity = fill(affinity, rows, 0)

    outer = affinity @ affinity.mT
    value = outer.square().sum(dim=(-2, -1)) - 2 * affinity.square().sum(dim=(-2, -1))
    value = value + _count(logits, masks)
    if not gradient:
        return value, None

    upstream = (outer @ affinity).sub_(affinity).mul_(4)
    upstream -= (upstream * affinity).sum(dim=-1, keepdim=True)
    return value, upstream.mul_(affinity)


def _count(tokens: Tensor, masks: Masks) -> Tensor | int:
    left_out = 0 if masks.left_out is None else masks.left_out.sum(dim=-1)
    return tokens.shape[-2] - left_out


def _probes(
    query: Tensor, key: Tensor, masks: Masks, num_probes: int, generator: torch.Generator | None
) -> Tensor:
    batch, heads, tokens, _ = query.shape
    query, key, mask, is_causal = _sdpa_masking(query, key, masks)
    columns = max(query.shape[-1], 2 * num_probes)  # equal widths keep the fused kernels
    shape = (batch, heads, tokens, 2 * num_probes)
    drawn = torch.randint(0, 2, shape, generator=generator, device=query.device)
    parts = (query, key, drawn.mul_(2).sub_(1).to(query.dtype))
    query, key, signs = (F.pad(item, (0, columns - item.shape[-1])) for item in parts)
    mixed = attend(query, key, signs, attn_mask=mask, is_causal=is_causal, scale=masks.scale)
    mixed = mixed[..., : 2 * num_probes].to(torch.promote_types(query.dtype, torch.float32))
    if masks.left_out is not None:
        mixed = mixed.masked_fill(masks.left_out[..., None], 0)

    first, second = mixed.split(num_probes, dim=-1)
    of_gram = (first.mT @ second).square().sum(dim=(-2, -1)) / num_probes**2
    of_affinity = mixed.square().sum(dim=(-2, -1)) / (2 * num_probes)
    return of_gram - 2 * of_affinity + _count(query, masks)


def _sdpa_masking(
    query: Tensor, key: Tensor, masks: Masks
) -> tuple[Tensor, Tensor, Tensor | None, bool]:
    """Return query, key, mask and causality for SDPA; padded rows may attend anywhere."""
    if masks.allowed is not None or masks.bias is not None:
        closed = masks.closed(query)
        assert masks.left_out is not None
        rows = masks.left_out[..., None]
        if masks.bias is None:
            return query, key, rows if closed is None else ~closed | rows, False
        mask = masks.bias if closed is None else masks.bias.masked_fill(closed, -torch.inf)
        if mask.shape[-2] == 1:  # one row for all queries: masked as a whole, or a key is open
            rows = rows.all(dim=-2, keepdim=True)
        return query, key, mask.masked_fill(rows, 0).to(query.dtype), False
    if masks.padded is None:
        return query, key, None, masks.is_causal
    if not masks.is_causal:
        return query, key, ~masks.padded[..., None, :], False

    # Causal and padded: an extra inner-product column masks padded keys; no N x N mask.
    closed = (masks.padded[..., None] * (-_BLOCKED / masks.scale)).to(key.dtype)
    closed = closed.expand(*key.shape[:-1], 1)
    return F.pad(query, (0, 1), value=1.0), torch.cat([key, closed], dim=-1), None, True


def _check_estimator(estimator: str, num_probes: int) -> None:
    if estimator not in ("exact", "probes"):
        raise ConfigError(
            f"affinity_penalty: estimator = {estimator!r}, expected 'exact' or 'probes'"
        )
    if num_probes < 1:
        raise ConfigError(f"affinity_penalty: num_probes = {num_probes}, expected at least 1")
