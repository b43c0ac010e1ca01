"""Position codes: a learnt table, or sines and cosines."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.errors import ShapeError
from wellposed.nn._checks import CheckedModule, read_table
from wellposed.options import Size
from wellposed.registry import Registry

POSITIONS = Registry[Callable[[Any], nn.Module]]("position")
"""`build(config) -> module` with `forward(positions) -> Tensor`.

Reads `hidden_size` and `max_position_embeddings`.
"""


def check_length(length: int, num_positions: int, where: str) -> None:
    """Raise `ShapeError` if a sequence has more tokens than there are positions."""
    if length > num_positions:
        raise ShapeError(
            f"{where}: received a sequence of {length} tokens; expected at most {num_positions},"
            " the number of positions (max_position_embeddings); truncate the input or build the"
            f" model with max_position_embeddings >= {length}"
        )


def sines_and_cosines(positions: Tensor, width: int) -> Tensor:
    """Return the codes (..., width) of integer positions (...), in float64 (on mps in float32)."""
    wide = torch.float32 if positions.device.type == "mps" else torch.float64
    pairs = torch.arange((width + 1) // 2, dtype=wide, device=positions.device)
    frequencies = torch.exp(pairs * (-2.0 * math.log(10000.0) / width))
    angles = positions.unsqueeze(-1).to(wide) * frequencies
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)[..., :width]


class LearnedPositions(CheckedModule, nn.Embedding):
    """`p -> E_p`, one learnt vector for each of `num_positions` positions.

    >>> LearnedPositions(10, 4)(torch.arange(3)).shape
    torch.Size([3, 4])
    """

    def __init__(self, num_positions: Size, embed_dim: Size) -> None:
        super().__init__(num_positions, embed_dim)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        """Map integer positions (...) to codes (..., embed_dim)."""
        return read_table(self, input, self.num_embeddings, super().forward)


class SinusoidalPositions(CheckedModule):
    """`P[p, 2i] = s sin(p / 10000^(2i/D))`, `P[p, 2i+1] = s cos(p / 10000^(2i/D))`; no parameters.

    Exact to one rounding of the table's dtype: angles are computed in float64, and a change of
    dtype refills the table. It is not saved with the model. An odd width ends in a sine. Vaswani et
    al. (2017), sec. 3.5.

    Args:
        num_positions: Number of positions.
        embed_dim: Width D of a token.
        scale: The factor s.

    Cost: num_positions x D numbers; a lookup per token.

    >>> SinusoidalPositions(10, 4)(torch.tensor([0])).tolist()
    [[0.0, 1.0, 0.0, 1.0]]
    """

    table: Tensor
    repr_fields = ("num_positions", "embed_dim", "scale")

    def __init__(self, num_positions: Size, embed_dim: Size, *, scale: float = 1.0) -> None:
        super().__init__()
        self.num_positions = num_positions
        self.embed_dim = embed_dim
        self.scale = scale
        self.register_buffer("table", torch.empty(num_positions, embed_dim), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the table."""
        positions = torch.arange(self.num_positions, device=self.table.device)
        self.table.copy_(self.scale * sines_and_cosines(positions, self.embed_dim))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> SinusoidalPositions:
        """Refill the table after a change of dtype: a cast would keep the old rounding."""
        before = self.table.dtype
        super()._apply(fn, recurse)
        if self.table.dtype is not before and not self.table.is_meta:
            self.reset_parameters()
        return self

    def rescale(self, factor: float) -> None:
        """Multiply the factor s."""
        self.scale *= factor
        self.reset_parameters()

    def forward(self, positions: Tensor) -> Tensor:
        """Map integer positions (...) to codes (..., embed_dim)."""
        read = partial(F.embedding, weight=self.table)
        return read_table(self, positions, self.num_positions, read)


class Rotations:
    """Rotate pair i of token p by the angle `p 10000^(-2i/d)`: products then depend on distances.

    Exact up to rounding; every vector keeps its length. Su et al. (2021), "RoFormer", eq. 34, with
    the pairs of `MaxMin`: entry i and entry i + d/2. The layers of one forward pass share an object,
    which computes sines and cosines once. Do not keep it for the next pass.
    """

    def __init__(self) -> None:
        self._codes: dict[tuple[object, ...], tuple[Tensor, ...]] = {}

    def __call__(self, vectors: Tensor, first: int = 0) -> Tensor:
        """Rotate (..., tokens, d), d even; ``first`` is the position of the first token."""
        sine, cosine = self._codes_of(vectors, first)
        left, right = vectors.chunk(2, -1)
        return torch.cat([left * cosine - right * sine, left * sine + right * cosine], -1)

    def _codes_of(self, vectors: Tensor, first: int) -> tuple[Tensor, ...]:
        count, width = vectors.shape[-2:]
        key = (first, count, width, vectors.dtype, vectors.device)
        if key not in self._codes:
            positions = torch.arange(first, first + count, device=vectors.device)
            codes = sines_and_cosines(positions, width).to(vectors.dtype)
            self._codes[key] = codes.unflatten(-1, (-1, 2)).unbind(-1)
        return self._codes[key]


class NoPositions(CheckedModule):
    """`p -> 0`: for attentions that encode positions themselves.

    >>> NoPositions(4)(torch.tensor([0, 1])).tolist()
    [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    """

    zero: Tensor

    def __init__(self, embed_dim: Size) -> None:
        super().__init__()
        self.register_buffer("zero", torch.empty(embed_dim), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the zeros."""
        self.zero.zero_()

    def forward(self, positions: Tensor) -> Tensor:
        """Map integer positions (...) to zeros (..., embed_dim)."""
        return self.zero.expand(*positions.shape, -1)


POSITIONS.register("none")(lambda config: NoPositions(config.hidden_size))
POSITIONS.register("learned")(
    lambda config: LearnedPositions(config.max_position_embeddings, config.hidden_size)
)


@POSITIONS.register("sinusoidal")
def build_sinusoidal(config: Any) -> SinusoidalPositions:
    """Build codes scaled by D^-1/2, the size of a token's entries before the common factor."""
    width = config.hidden_size
    return SinusoidalPositions(config.max_position_embeddings, width, scale=1.0 / math.sqrt(width))
