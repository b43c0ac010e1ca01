"""Weights and scales of cosine attention, and the bounds of its heads (theory note B6)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from wellposed.certification.rules._attention_weights import norms
from wellposed.linalg import Bound, HeadMaps, certified_spectral_norm


@dataclass(frozen=True)
class CosineWeights:
    """Weights and scales of cosine attention, as in `cosine_attention_bound`."""

    query: Tensor
    key: Tensor
    value: Tensor
    outputs: HeadMaps
    eps: float
    temperature: Tensor | float
    value_scale: Tensor | float

    @cached_property
    def tau(self) -> Tensor:
        """Temperatures (H,)."""
        tau = torch.as_tensor(self.temperature, dtype=torch.float64).detach().abs()
        return tau.expand(len(self.query))

    @cached_property
    def scale(self) -> Tensor:
        """``nu / sqrt(eps)`` (H,)."""
        nu = torch.as_tensor(self.value_scale, dtype=torch.float64).detach().abs()
        return (nu / math.sqrt(self.eps)).expand(len(self.query))

    @cached_property
    def sizes(self) -> tuple[Tensor, Tensor, Tensor]:
        """``|W_Q|``, ``|W_K|`` and ``|W_V|`` of each head."""
        return norms(self.query), norms(self.key), norms(self.value)

    def per_token(self) -> Tensor:
        """Bound each head in norm tok, before its output weight (H,)."""
        query, key, value = self.sizes
        steepest = self.tau * torch.maximum(query, key)
        return self.scale * (value.square() + steepest.square()).sqrt() * (1 + 1e-12)

    def per_row(self, mass: float, key_mass: float) -> Tensor:
        """Bound each head in norm 2, before its output weight (H,)."""
        query, key, value = self.sizes
        moved = mass * value
        logits = self.tau * (query.square() + (key_mass * key).square()).sqrt()
        written = self.tau * (query.square() + (mass * key).square()).sqrt()
        together = (moved.square() + written.square()).sqrt()
        return self.scale * torch.minimum(moved + logits, together) * (1 + 1e-12)

    def all_heads(self, mass: float) -> Bound:
        """Bound all heads in norm 2: each reads the same perturbation."""
        tau = self.tau[:, None, None]
        parts = (mass * self.value, tau * self.query, mass * tau * self.key)
        reads = torch.cat([part.detach().double() for part in parts], dim=-1)
        writes = self.outputs.maps * self.scale[:, None, None]
        # (heads, in, d) -> (in, heads d), and (heads, d, out) -> (heads d, out)
        sides = (reads.movedim(0, 1).flatten(1), writes.flatten(0, 1))
        sizes = [certified_spectral_norm(side, method="cholesky") for side in sides]
        return Bound(sizes[0] * sizes[1] * (1 + 1e-12), "heads together, 2 (B6)")
