"""Weights of attention by head, in row convention ``query = x W_h + b_h``, and norms of their maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from wellposed.certification._layer_bound import Refused
from wellposed.certification._walk import RuleContext
from wellposed.linalg import Bound, HeadMaps, certified_spectral_norm, shared_points_norm
from wellposed.nn.attention import HeadProjections

# Up to this width every form is tried; above it those that win on most weights.
TRY_ALL_BELOW = 128


@dataclass(frozen=True)
class Slice:
    """A projection that is part of a larger weight."""

    weight: Tensor
    bias: Tensor | None


Affine: TypeAlias = nn.Linear | Slice
"""``x -> weight @ x + bias``."""


def slices(weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> list[Slice]:
    """Cut a fused projection (rows are outputs) into its parts."""
    biases = [None] * len(sizes) if bias is None else bias.split(list(sizes))
    return [Slice(*pair) for pair in zip(weight.split(list(sizes)), biases, strict=True)]


@dataclass(frozen=True)
class AttentionWeights:
    """Query, key, value (H, D, d) and output (H, d, E), with biases."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    query_bias: Tensor
    key_bias: Tensor
    value_bias: Tensor
    output_bias: Tensor

    @classmethod
    def from_projections(
        cls, query: Affine, key: Affine, value: Affine, output: Affine, head_dim: int
    ) -> AttentionWeights:
        """Cut four projections into heads of width ``head_dim``; float64."""
        widths = [part.weight.shape[0] for part in (query, key, value)]
        if len({*widths, output.weight.shape[1]}) > 1 or widths[0] % head_dim:
            raise Refused(
                f"queries, keys and values are {widths} wide and its output reads"
                f" {output.weight.shape[1]}, which is not the same number of heads of {head_dim}"
            )

        def bias(part: Affine) -> Tensor:
            values = part.weight.new_zeros(len(part.weight)) if part.bias is None else part.bias
            return values.detach().double()

        inward = (query, key, value)
        # (heads head_dim, in) -> (heads, in, head_dim); biases (heads, head_dim)
        q, k, v = (p.weight.detach().double().unflatten(0, (-1, head_dim)).mT for p in inward)
        bq, bk, bv = (bias(part).unflatten(0, (-1, head_dim)) for part in inward)
        out = output.weight.detach().double().mT.unflatten(0, (-1, head_dim))
        return cls(q, k, v, out, bq, bk, bv, bias(output))

    def with_longer_queries(self, factor: float) -> AttentionWeights:
        """Return the weights of attention whose logits are multiplied by a factor."""
        return replace(self, query=self.query * factor, query_bias=self.query_bias * factor)

    @property
    def head_dim(self) -> int:
        return self.query.shape[-1]

    @cached_property
    def output_norm(self) -> Tensor:
        """Upper bound of ``|W_O|``."""
        return certified_spectral_norm(self.output.flatten(0, 1), method="cholesky")

    @cached_property
    def query_norms(self) -> Tensor:
        """Upper bounds of ``|Q_h|`` (H,)."""
        return norms(self.query)

    @cached_property
    def key_norms(self) -> Tensor:
        """Upper bounds of ``|K_h|`` (H,)."""
        return norms(self.key)

    @cached_property
    def value_norms(self) -> Tensor:
        """Upper bounds of ``|V_h|``."""
        return norms(self.value)

    @cached_property
    def outputs(self) -> HeadMaps:
        """``W_O,h`` as maps of the heads' outputs."""
        return HeadMaps(self.output)

    @cached_property
    def paths(self) -> HeadMaps:
        """``V_h W_O,h`` as one map (H, d, E), up to a rotation of its input."""
        return HeadMaps.product(self.value, self.output)

    @cached_property
    def logits(self) -> HeadMaps:
        """``W_K,h W_Q,h^T`` as one map (H, d, D), up to a rotation of its output."""
        return HeadMaps.product(self.key, self.query.mT)

    @cached_property
    def query_term(self) -> Tensor:
        """Bound ``|sum_h (V_h W_O,h)^T S_h W_K,h W_Q,h^T|`` over covariances S_h of points of the unit
        ball: what a move of one query does, 0-dim (B21)."""
        apart = (self.paths.norms * self.logits.norms).sum() * (1 + 1e-12)
        forms = [apart]
        if len(self.query) > 1:
            forms.append(self.paths.through_points(self.logits))
        if self.is_small:
            # As maps of the points: V_h R_O^T and W_K,h R_Q^T, with triangular factors R.
            write = HeadMaps.product(self.output.mT, self.value.mT).transposed
            read = HeadMaps.product(self.query, self.key.mT).transposed
            forms.append(shared_points_norm(write, read).sum() * (1 + 1e-12))
        return torch.stack(forms).amin()

    @property
    def is_small(self) -> bool:
        """Whether forms that rarely win are worth their time."""
        return self.query.shape[1] <= TRY_ALL_BELOW

    def join(self, per_head: Tensor, form: str) -> Bound:
        """Bound heads of constants ``per_head`` *per unit of* ``|V_h W_O,h|`` together (L6, B21)."""
        joined = self.paths.joined(per_head, balance=self.is_small)
        return Bound(joined, f"{form}, value to output as one map")


def weights_of(module: HeadProjections, context: RuleContext) -> AttentionWeights:
    """Return the weights of a module; their norms are computed once per certificate."""
    return context.remember(module, "AttentionWeights", partial(cut_into_heads, module))


def cut_into_heads(module: HeadProjections) -> AttentionWeights:
    """Return the projections of a module of ours as weights of its heads."""
    return AttentionWeights.from_projections(
        module.q_proj,
        module.k_proj,
        module.v_proj,
        module.o_proj,
        head_dim=module.embed_dim // module.num_heads,
    )


def norms(weights: Tensor) -> Tensor:
    """Return the certified spectral norm of each matrix of a batch, float64."""
    return certified_spectral_norm(weights.detach())
