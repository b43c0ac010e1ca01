"""Token and position side by side, so that no two (token, position) pairs share a vector."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError, ShapeError
from wellposed.nn.checks import INTEGERS, is_plain, read_table
from wellposed.nn.positions import (
    LearnedPositions,
    SinusoidalPositions,
    check_length,
    sines_and_cosines,
)
from wellposed.nn.transject.orthogonal import ResetByParts
from wellposed.options import Size

PositionKind = Literal["sinusoidal", "learned"]


class InjectiveEmbedding(ResetByParts):
    """`(v, p) -> [E_v, P_p]`, each of width d/2: distinct where token or position differ, as a sum
    need not be.

    Exact as long as the rows of E differ, and those of P: sines and cosines of integers do;
    `token_margin()` measures it for E. Sengupta et al. (2023), sec. 3.5; the code of the paper
    steps through its frequencies twice too fast, so that 112 of 256 channels hardly change, and
    pairs sines and cosines of different frequencies. E is a plain `nn.Embedding`, which
    `constrain_(..., where="*.token", embeddings="fit")` holds orthogonal, as the paper's is to be
    and its code's is not: by its columns, `E^T E = g^2 I`, so that no token vector is longer than
    g.

    Args:
        vocab_size: number of tokens.
        embed_dim: width d, even.
        position: `"sinusoidal"`, without parameters and for any length; or `"learned"`, a table.
        max_positions: length of the learnt table, and of the stored part of the sines.
        padding_idx: as in `nn.Embedding`.

    Raises:
        ConfigError: odd width, a size that is no integer of at least 1, `padding_idx` outside the
            vocabulary, or an unknown kind. In `forward`, ShapeError: a sequence or (looked for on
            the CPU) a position beyond the learnt table.

    Cost: a lookup; sines beyond `max_positions`, or at given positions, are computed anew in
    float64.

    >>> embedding = InjectiveEmbedding(10, 8)
    >>> embedding(torch.tensor([[3, 3]])).shape, embedding.token_margin() > 0
    (torch.Size([1, 2, 8]), True)
    """

    def __init__(
        self,
        vocab_size: Size,
        embed_dim: Size,
        *,
        position: PositionKind = "sinusoidal",
        max_positions: Size = 512,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        if embed_dim < 2 or embed_dim % 2:
            raise ConfigError(
                f"InjectiveEmbedding: embed_dim is {embed_dim}; expected an even width of at least"
                " 2, half for the token and half for its position"
            )
        if padding_idx is not None and not -vocab_size <= padding_idx < vocab_size:
            raise ConfigError(
                f"InjectiveEmbedding: padding_idx is {padding_idx}; expected a token in [0,"
                f" {vocab_size})"
            )
        self.embed_dim = embed_dim
        self.max_positions = max_positions
        self.position_kind: PositionKind = position
        self.token = nn.Embedding(vocab_size, embed_dim // 2, padding_idx=padding_idx)
        build = SinusoidalPositions if position == "sinusoidal" else LearnedPositions
        self.position = build(max_positions, embed_dim // 2)

    def forward(self, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Embed tokens.

        Args:
            input_ids: int (batch, tokens).
            positions: int (tokens,) or (batch, tokens), from 0; 0, 1, 2, ... where not given.

        Returns:
            (batch, tokens, d).

        Raises:
            ShapeError: shapes or dtypes do not fit, or a learnt table is too short for the sequence
                or (on the CPU) for a position.
        """
        if input_ids.dim() != 2:
            raise ShapeError(
                f"InjectiveEmbedding: input_ids is {tuple(input_ids.shape)}; expected (batch,"
                " tokens)"
            )
        tokens = read_table(self, input_ids, self.token.num_embeddings, self.token)
        codes = self._codes(input_ids, positions).to(tokens.dtype)
        return torch.cat((tokens, codes.expand_as(tokens)), dim=-1)

    def _codes(self, input_ids: Tensor, positions: Tensor | None) -> Tensor:
        length = input_ids.shape[1]
        shapes = ((length,), tuple(input_ids.shape))
        if positions is not None and (
            positions.dtype not in INTEGERS or tuple(positions.shape) not in shapes
        ):
            raise ShapeError(
                f"InjectiveEmbedding: positions is {positions.dtype} {tuple(positions.shape)};"
                f" expected torch.int64 or torch.int32 {shapes[0]} or {shapes[1]}"
            )
        # Sines that are wrapped or hooked are called, and end where their table does.
        counted = torch.arange(length, device=input_ids.device) if positions is None else positions
        if self.position_kind == "learned" or not is_plain(self.position, SinusoidalPositions):
            if positions is None:
                check_length(length, self.max_positions, "InjectiveEmbedding")
            return self.position(counted)
        if positions is None and length <= self.max_positions:
            return cast(Tensor, self.position.table)[:length]
        return sines_and_cosines(counted, self.embed_dim // 2)

    @torch.no_grad()
    def token_margin(self, *, rows_at_a_time: int = 1024) -> float:
        """Return the smallest distance between two token vectors: above 0, the map is injective.

        Cost: V^2 d/2 multiply-adds for V tokens, memory `rows_at_a_time` x V.
        """
        table = self.token.weight.detach().float()
        least = float("inf")
        for start in range(0, len(table), rows_at_a_time):
            rows = table[start : start + rows_at_a_time]
            distances = torch.cdist(rows, table, compute_mode="donot_use_mm_for_euclid_dist")
            own = torch.arange(len(rows), device=table.device)
            distances[own, own + start] = torch.inf
            least = min(least, float(distances.min()))
        return least
