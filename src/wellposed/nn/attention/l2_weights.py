"""The weights of an L2 attention: projections, the mixing of heads that they stand for, and their
initial values."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.errors import NotLipschitzError
from wellposed.linalg import Norm, check_norm
from wellposed.nn.attention.heads import head_width
from wellposed.nn.attention.l2_division import UnitWeights, uncompiled
from wellposed.nn.attention.l2_refusal import (
    DivisionBound,
    Values,
    check_options,
    l2_attention_refusal,
)


class L2Weights(nn.Module):
    """`W_h`, `R_h` and `W_o` of `L2SelfAttention`, whose arguments these are."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        tied: bool = True,
        contractive: float | None = None,
        norm: Norm = "tok",
        bound: DivisionBound = "sharp",
        values: Values | None = None,
        query_width: int = 1,
        max_tokens: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        init_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_width(type(self).__name__, embed_dim, num_heads)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.tied = tied
        self.contractive = contractive
        self.norm: Norm = check_norm(norm)
        self.bound: DivisionBound = bound
        self.values: Values = values or ("paper" if tied else "plain")
        self.query_width = query_width
        self.max_tokens = max_tokens
        self.dropout = dropout
        self.init_scale = init_scale
        check_options(
            tied=tied,
            contractive=contractive,
            bound=bound,
            norm=self.norm,
            values=self.values,
            query_width=query_width,
            max_tokens=max_tokens,
            dropout=dropout,
            init_scale=init_scale,
        )
        columns = query_width * embed_dim
        self.q_proj = nn.Linear(embed_dim, columns, bias=bias)
        self.k_proj = None if tied else nn.Linear(embed_dim, columns, bias=bias)
        self.v_proj = None if self.values == "free" else nn.Linear(embed_dim, embed_dim, bias=bias)
        self.mix = (
            nn.Parameter(torch.empty(num_heads, query_width * self.head_dim, self.head_dim))
            if self.values == "free"
            else None
        )
        self.o_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights anew: Glorot's uniform, or `U(-s, s) / sqrt(D)` where `init_scale` is s;
        biases are zero."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            if projection is None:
                continue
            if self.init_scale is None:
                nn.init.xavier_uniform_(projection.weight)
            else:
                _uniform_(projection.weight, self.init_scale / math.sqrt(self.embed_dim))
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        if self.mix is not None:
            # Glorot's bound of each head by itself; the paper's R_h has entries of that order
            # divided by sqrt(d).
            _uniform_(self.mix, math.sqrt(6 / sum(self.mix.shape[1:])))

    def head_weights(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return `W_h` (H, D, w), `R_h` (H, w, w) and `W_O,h` (H, w, D), w = `query_width` d, R and
        W_O zero-padded.

        Args:
            dtype: in which `R_h`, a product of weights, is computed; the weights' own where not
            given.

        Raises:
            NotLipschitzError: the values are plain, so there is no `R_h`.
        """
        if self.values == "plain":
            raise NotLipschitzError(f"L2SelfAttention: {l2_attention_refusal(plain_values=True)}")
        dtype = dtype or self.q_proj.weight.dtype
        projection = self.q_proj.weight.to(dtype).unflatten(0, (self.num_heads, -1)).mT
        missing = projection.shape[-1] - self.head_dim
        output = self.o_proj.weight.to(dtype).mT.unflatten(0, (self.num_heads, -1))
        return (
            projection,
            F.pad(self._mixing(dtype), (0, missing)),
            F.pad(output, (0, 0, 0, missing)),
        )

    def _mixing(self, dtype: torch.dtype | None = None) -> Tensor:
        """`R_h`, (H, w, d), in the precision of the weights even under autocast."""
        dtype = dtype or self.q_proj.weight.dtype
        if self.mix is not None:
            return self.mix.to(dtype)
        assert self.v_proj is not None
        with torch.autocast(self.q_proj.weight.device.type, enabled=False):
            query = self.q_proj.weight.to(dtype).unflatten(0, (self.num_heads, -1))
            value = self.v_proj.weight.to(dtype).unflatten(0, (self.num_heads, -1))
            return query @ value.mT / math.sqrt(self.head_dim)

    @uncompiled
    def _unit_weights(self) -> UnitWeights:
        with torch.autocast(self.q_proj.weight.device.type, enabled=False):
            value = None if self.v_proj is None else self.v_proj.weight
            return UnitWeights.of(
                self.q_proj.weight,
                self.o_proj.weight,
                value=value,
                mix=self.mix,
                num_heads=self.num_heads,
            )

    def extra_repr(self) -> str:
        """Everything that is not seen from the projections."""
        parts = [f"num_heads={self.num_heads}", f"tied={self.tied}", f"values={self.values!r}"]
        if self.contractive is not None:
            parts.append(
                f"contractive={self.contractive}, norm={self.norm!r}, max_tokens={self.max_tokens}"
            )
            if self.bound != "sharp":
                parts.append(f"bound={self.bound!r}")
        return ", ".join([*parts, f"dropout={self.dropout}"])


def _uniform_(weight: Tensor, bound: float) -> None:
    nn.init.uniform_(weight, -bound, bound)
