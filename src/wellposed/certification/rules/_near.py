"""Bounds of attention on balls around recorded tokens, where its weights are known (note B22)."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from wellposed.certification._centres import Centre
from wellposed.certification._layer_bound import LayerBound
from wellposed.certification._walk import RuleContext
from wellposed.certification.rules._attention_weights import AttentionWeights
from wellposed.certification.rules._cosine_weights import CosineWeights
from wellposed.linalg import Bound, MaskKind, smallest_bound

# Allowance for float64 sums, as the terms are not products of certified norms alone.
_SLACK = 1 + 1e-9
_MASKS: dict[str, MaskKind] = {"none": "full", "causal": "causal"}


def dot_product_near(weights: AttentionWeights, centre: Centre, moved: float) -> Bound | None:
    """Bound dot-product attention in norm tok for tokens within ``moved`` of those of ``centre``.

    None if its mask is not known. The attention weights at the centre are known, and change at most
    by a factor ``exp(2 Delta)`` in the ball (theory note B22).
    """
    if centre.mask == "other":
        return None
    reach = centre.reach(moved)
    causal = centre.mask == "causal"
    rows = [
        _Rows(weights, tokens, causal=causal).bounds(weights, reach) for tokens in centre.tokens
    ]
    forms = [
        Bound(torch.stack([bound.value for bound in inputs]).amax(), inputs[0].form)
        for inputs in zip(*rows, strict=True)
    ]
    return smallest_bound(forms)


def nearer(
    bound: LayerBound, weights: AttentionWeights, centre: Centre | None, context: RuleContext
) -> LayerBound:
    """Return the smaller of a bound on a ball and that around the recorded tokens, if there are any."""
    fixed = context.given_mask in (None, _MASKS.get(centre.mask if centre else ""))
    if centre is None or not fixed or not math.isfinite(bound.lipschitz):
        return bound
    near = dot_product_near(weights, centre, context.moved)
    if near is None or not float(near.value) < bound.lipschitz:
        return bound
    # The attention weights are those of the pattern that the module ran.
    context.builder.masks.discard("any")
    context.builder.masks.add(_MASKS[centre.mask])
    return replace(bound, lipschitz=float(near.value), form=near.form)


class _Rows:
    """Attention at one input: for every head and query, what bounds need."""

    def __init__(self, weights: AttentionWeights, tokens: Tensor, *, causal: bool) -> None:
        root = math.sqrt(weights.head_dim)
        query = tokens @ weights.query + weights.query_bias[:, None]
        key = tokens @ weights.key
        logits = query @ key.mT / root
        if causal:
            hidden = torch.ones_like(logits, dtype=torch.bool).triu(1)
            logits = logits.masked_fill(hidden, -math.inf)

        self.shares = logits.softmax(-1)
        """P (H, N, N)."""
        self.visible = logits.isfinite()
        self.slope = weights.logits.norms[:, None] / root
        self.pulls = (query @ weights.key.mT).norm(dim=-1) / root
        """``|A_h x_i + bias|`` (H, N): how a move of a key changes its logit."""
        # Triangular factors keep lengths, at the width of a head.
        self.keys = key @ _triangular(weights.query).mT / root
        """``A_h^T x_j`` (H, N, d) up to a rotation: how a move of the query changes logit j."""
        value = tokens @ weights.value
        self.values = value
        self.written = value @ _triangular(weights.output.mT).mT
        """``x_j V_h W_O,h`` (H, N, d) up to a rotation."""

    def bounds(self, weights: AttentionWeights, reach: float) -> list[Bound]:
        """Return the bounds of all heads joined, and one by one, for the ball of radius ``reach``."""
        pulls = self.pulls * _SLACK + self.slope * reach
        middles = self.shares @ self.keys
        apart = (middles[:, :, None] - self.keys[:, None]).norm(dim=-1)
        farthest = apart.masked_fill(~self.visible, 0.0).amax(-1)
        growth = (reach * (pulls + farthest) * _SLACK).exp()
        reads = _deviations(self.shares, self.keys) * growth + self.slope * reach

        def terms(values: Tensor, sizes: Tensor) -> Tensor:
            size = sizes[:, None]
            spread = _deviations(self.shares, values) * growth + size * reach
            averages = (size.square() + (spread * pulls).square()).sqrt()
            return (averages + spread * reads) * _SLACK

        by_head = terms(self.values, weights.value_norms).amax(-1)
        together = weights.outputs.joined(by_head, balance=weights.is_small)
        apart = terms(self.written, weights.paths.norms).sum(0).amax()
        form = "around the inputs, tok (B22)"
        return [Bound(together, f"{form}, heads joined"), Bound(apart, form)]


def _triangular(matrix: Tensor) -> Tensor:
    return torch.linalg.qr(matrix, mode="r").R


def _deviations(shares: Tensor, values: Tensor) -> Tensor:
    """Bound the largest standard deviation of ``values`` (H, N, d) along a direction, by row (H, N)."""
    middles = shares @ values
    width = values.shape[-1]
    outer = (values[..., :, None] * values[..., None, :]).flatten(-2)
    grams = (shares @ outer).unflatten(-1, (width, width))
    grams = grams - middles[..., :, None] * middles[..., None, :]
    largest = torch.linalg.eigvalsh(grams)[..., -1].clamp_min(0)
    # The subtraction and the eigensolver lose some units of the largest value.
    scale = values.square().sum(-1).amax(-1)[:, None]
    return (largest + 1e-12 * scale).sqrt()


def cosine_near(
    cosine: CosineWeights, weights: AttentionWeights, centre: Centre, moved: float
) -> Bound:
    """Bound cosine attention in norm tok on balls: the slope of ``n`` is ``1 / sqrt(l^2 + eps)`` with
    the shortest length l of a query, key or value there, not ``1 / sqrt(eps)``."""
    slopes = []
    lengths = []
    parts = (cosine.query, cosine.key, cosine.value)
    biases = (weights.query_bias, weights.key_bias, weights.value_bias)
    for weight, bias, size in zip(parts, biases, cosine.sizes, strict=True):
        vectors = (centre.tokens[:, None] @ weight + bias[:, None]).norm(dim=-1)
        reach = size * centre.reach(moved)
        shortest = (vectors.amin((0, -1)) * (1 - 1e-9) - reach).clamp_min(0)
        longest = vectors.amax((0, -1)) * _SLACK + reach
        slopes.append(size / (shortest.square() + cosine.eps).sqrt())
        lengths.append(longest / (longest.square() + cosine.eps).sqrt())

    query, key, value = slopes
    of_query, of_key, of_value = lengths
    logits = cosine.tau * of_value * (query * of_key + key * of_query)
    per_head = cosine.scale * math.sqrt(cosine.eps) * (value + logits) * _SLACK
    return Bound(cosine.outputs.joined(per_head), "around the inputs, tok (B22)")
