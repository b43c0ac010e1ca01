"""What a causal TransJect keeps of the tokens it has seen: sums and maxima, none of which grows
with their number."""

from __future__ import annotations

import torch
from torch import Tensor

from wellposed.errors import ShapeError


class TransJectCache:
    """State of one-token generation: d numbers for the spectrum, `E (d + 1)` for the gates of each
    layer.

    Exact: later tokens come out as in one pass over the whole sequence, up to rounding. Its size
    does not depend on the number of tokens, unlike a cache of keys and values. Fill it by passing
    it to `TransJectStack`; one cache belongs to one batch of sequences.

    >>> cache = TransJectCache()
    >>> cache.num_tokens
    0
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.energy: Tensor | None = None
        self.pools: dict[int, Tensor] = {}
        self.squares: dict[int, Tensor] = {}

    def check_batch(self, batch: int) -> None:
        """Raise `ShapeError` where the cache is of another number of sequences; one prefix may be
        common to many."""
        kept = [self.energy, *self.squares.values(), *(pools[0] for pools in self.pools.values())]
        wrong = sorted(
            {len(part) for part in kept if part is not None and len(part) not in (1, batch)}
        )
        if wrong:
            raise ShapeError(
                f"TransJectCache: received {batch} sequences, and the cache holds the sums of"
                f" {wrong[0]}; expected as many; pick or repeat those of the cache with reorder_,"
                " or begin with a new cache"
            )

    def add_energy(self, energy: Tensor) -> Tensor:
        """Add what is stored to the running sums `(batch, tokens, d)` of new tokens, and store the
        last of them."""
        if self.energy is not None:
            energy = energy + self.energy.unsqueeze(1)
        self.energy = energy[:, -1].detach()
        return energy

    def add_squares(self, layer: int, squares: Tensor) -> Tensor:
        """The same for the running sums of squares (batch, tokens) that a layer's gates are divided
        by."""
        if layer in self.squares:
            squares = squares + self.squares[layer].unsqueeze(1)
        self.squares[layer] = squares[:, -1].detach()
        return squares

    def add_pools(self, layer: int, pools: Tensor) -> Tensor:
        """Join stored maxima to the running maxima (experts, batch, tokens, d) of new tokens, and
        store the last."""
        if layer in self.pools:
            pools = torch.maximum(pools, self.pools[layer].unsqueeze(2))
        self.pools[layer] = pools[:, :, -1].detach()
        return pools

    def reorder_(self, rows: Tensor) -> TransJectCache:
        """Keep the sequences `rows` (int, (new batch,)), as beam search asks for; rows may
        repeat."""
        if self.energy is not None:
            self.energy = self.energy.index_select(0, rows)
        self.squares = {layer: kept.index_select(0, rows) for layer, kept in self.squares.items()}
        self.pools = {layer: kept.index_select(1, rows) for layer, kept in self.pools.items()}
        return self
