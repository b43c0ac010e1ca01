"""Weights of a multi-head attention layer per head, in row convention (``query = x W_h + b_h``),
and shared pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from wellposed.certification._bounds import LayerBound, times
from wellposed.certification._rules import Refused, Site
from wellposed.linalg import Bound, MaskKind, Norm, certified_spectral_norm, least
from wellposed.nn.attention.heads import HeadProjections

TRAINING_DROPOUT = (
    "dropout on attention weights is on (training mode), for which no bound is proved; call"
    " module.eval()"
)


class Affine(Protocol):
    """``x -> weight @ x + bias``."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def bias(self) -> Tensor | None: ...


@dataclass(frozen=True)
class Slice:
    """A projection that is a part of a larger weight."""

    weight: Tensor
    bias: Tensor | None


def slices(weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> list[Slice]:
    """Cut a fused projection (rows are outputs) into those it is made of."""
    biases = [None] * len(sizes) if bias is None else bias.split(list(sizes))
    return [Slice(*pair) for pair in zip(weight.split(list(sizes)), biases, strict=True)]


def split_columns(projection: Affine, num_heads: int) -> tuple[Tensor, Tensor]:
    """Return ``W_h`` as (H, D, d) and the biases (H, d) of a projection whose outputs are cut into
    heads, float64."""
    weight = projection.weight.detach().double()
    bias = (
        weight.new_zeros(weight.shape[0])
        if projection.bias is None
        else projection.bias.detach().double()
    )
    return weight.unflatten(0, (num_heads, -1)).mT, bias.unflatten(0, (num_heads, -1))


def split_rows(projection: Affine, num_heads: int) -> tuple[Tensor, Tensor]:
    """Return ``W_O,h`` as (H, d, E) and the bias (E,) of a projection that reads concatenated
    heads, float64."""
    weight = projection.weight.detach().double()
    bias = (
        weight.new_zeros(weight.shape[0])
        if projection.bias is None
        else projection.bias.detach().double()
    )
    return weight.mT.unflatten(0, (num_heads, -1)), bias


@dataclass(frozen=True)
class AttentionWeights:
    """Query, key, value (H, D, d) and output (H, d, E) with biases; rotated keys need theirs."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    query_bias: Tensor
    key_bias: Tensor
    value_bias: Tensor
    output_bias: Tensor

    @classmethod
    def of(
        cls, query: Affine, key: Affine, value: Affine, output: Affine, head_dim: int
    ) -> AttentionWeights:
        """Cut four projections into heads of this width, however many there are."""
        widths = [part.weight.shape[0] for part in (query, key, value)]
        if len({*widths, output.weight.shape[1]}) > 1 or widths[0] % head_dim:
            raise Refused(
                f"queries, keys and values are {widths} wide and its output reads"
                f" {output.weight.shape[1]}, which is not the same number of heads of {head_dim}"
            )
        heads = widths[0] // head_dim
        (q, bq), (k, bk), (v, bv) = (
            split_columns(projection, heads) for projection in (query, key, value)
        )
        o, bo = split_rows(output, heads)
        return cls(q, k, v, o, bq, bk, bv, bo)

    @property
    def head_dim(self) -> int:
        return self.query.shape[-1]

    @cached_property
    def output_norm(self) -> Tensor:
        """``|W_O|``."""
        return certified_spectral_norm(self.output.flatten(0, 1), method="cholesky")

    @cached_property
    def value_norms(self) -> Tensor:
        """``|V_h|``."""
        return norms(self.value)

    @cached_property
    def path_norms(self) -> Tensor:
        """``|V_h W_O,h|``."""
        return product_norms(self.value, self.output.mT)


def weights_of(module: HeadProjections, site: Site) -> AttentionWeights:
    """The weights of a module, with the norms that they have already needed in this certificate."""
    projections = (module.q_proj, module.k_proj, module.v_proj, module.o_proj)
    return site.remember(
        module, "AttentionWeights", lambda: AttentionWeights.of(*projections, module.head_dim)
    )


def norms(weights: Tensor) -> Tensor:
    """Certified spectral norm of each matrix of a batch, float64."""
    return certified_spectral_norm(weights.detach())


def product_norms(left: Tensor, right: Tensor) -> Tensor:
    """Spectral norms of ``A B^T`` for thin A, B (H, D, d) through their triangular factors, never
    forming D x D."""
    factors = [torch.linalg.qr(matrix.double(), mode="r").R for matrix in (left, right)]
    return norms(factors[0] @ factors[1].mT)


def row_mass(seq_len: int, mask: MaskKind, spread: float) -> float:
    """Return ``kP >= |P|_2`` for softmax logits that differ by at most ``2 spread`` within a row
    (B5).

    ``kP^2 = min(N, sum_i 1/(1 + (n_i - 1) e^(-2 spread)))``, ``n_i`` the keys that query i sees.
    """
    decay = math.exp(-2 * spread) if math.isfinite(spread) else 0.0
    if mask == "full":
        total = seq_len / (1 + (seq_len - 1) * decay)
    elif mask == "causal":
        total = float((1 / (1 + decay * torch.arange(seq_len, dtype=torch.float64))).sum())
    else:
        total = float(seq_len)
    return math.sqrt(min(seq_len, total) * (1 + 1e-12))


def join_heads(per_head: Tensor, weights: AttentionWeights, form: str) -> Bound:
    """Bound ``concat_h(head_h) W_O`` where head h is ``per_head[h]``-Lipschitz *per unit of*
    ``|W_V,h|`` (L6).

    The least of ``|W_O| sqrt(sum |V_h|^2 L_h^2)`` and ``sum |V_h W_O,h| L_h``, for norms tok and 2.
    """
    joined = weights.output_norm * (weights.value_norms * per_head).square().sum().sqrt()
    return least(
        [
            Bound(joined, f"{form}, |W_O| sqrt(sum L_h^2)"),
            Bound((weights.path_norms * per_head).sum(), f"{form}, sum |V_h W_O,h| L_h"),
        ]
    )


def averaged_values_radius(weights: AttentionWeights, radius: float) -> float:
    """2-norm that no output token exceeds when each head averages ``x_j V_h + b_h`` over tokens
    with ``|x_j| <= R``."""
    constant = torch.einsum("hd,hde->e", weights.value_bias, weights.output) + weights.output_bias
    joined = weights.output_norm * weights.value_norms.square().sum().sqrt()
    spread = min(float(weights.path_norms.sum()), float(joined))
    return times(spread, radius) + float(constant.norm())


def in_norm(
    tok: Bound, frobenius: Callable[[], Bound], site: Site, width: int, *, out_radius: float
) -> LayerBound:
    """Turn bounds in tok and norm 2 into one in the site's norm.

    ``|.|_tok <= |.|_2 <= sqrt(N) |.|_tok`` and ``|.|_inf <= |.|_tok <= sqrt(D) |.|_inf`` give the
    other two routes.
    """
    norm: Norm = site.norm
    if norm == "tok":
        choice = tok
    elif norm == 2:
        choice = least(
            [frobenius(), Bound(tok.value * math.sqrt(site.seq_len), f"sqrt(N) x ({tok.form})")]
        )
    else:
        choice = Bound(tok.value * math.sqrt(width), f"sqrt(D) x ({tok.form})")
    return LayerBound(float(choice.value), choice.form, out_radius=out_radius)
