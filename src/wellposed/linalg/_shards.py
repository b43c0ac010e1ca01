"""DTensors in parts (FSDP2, tensor parallel): cuts, owners, and the exchanges of shards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from wellposed.linalg._tensors import in_stacks, is_sharded


class Cut(NamedTuple):
    """How a tensor is cut: over which process groups, along which dim, and this process's rank."""

    groups: tuple[Any, ...]
    dim: int
    ranks: int
    rank: int

    def span(self, length: int, rank: int) -> tuple[int, int]:
        """Return the half-open range of a rank: equal pieces, until nothing is left."""
        piece = -(-length // self.ranks)
        return min(rank * piece, length), min((rank + 1) * piece, length)

    def shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Return the shape of the part of a rank."""
        start, stop = self.span(shape[self.dim], rank)
        return (*shape[: self.dim], stop - start, *shape[self.dim + 1 :])


def cut_of(tensor: Tensor, *, once: bool = True) -> Cut | None:
    """Return how a tensor is cut; None if whole, a partial sum, or cut along several dimensions.

    Unless ``once`` is False, also None if it is cut over several mesh dimensions or in strides.
    """
    if not is_sharded(tensor):
        return None
    mesh, places = tensor.device_mesh, tensor.placements
    over = [index for index, place in enumerate(places) if not place.is_replicate()]
    dims: set[Any] = {getattr(places[index], "dim", None) for index in over}
    if len(dims) != 1 or None in dims:
        return None
    if once and [type(places[index]).__name__ for index in over] != ["Shard"]:
        return None
    groups, ranks = tuple(map(mesh.get_group, over)), math.prod(map(mesh.size, over))
    return Cut(groups, dims.pop(), ranks, mesh.get_local_rank(over[0]))


def cost_of(shape: Sequence[int]) -> int:
    """Return what the work on a matrix costs: ``rows * columns * min(rows, columns)``."""
    return math.prod(shape) * min(shape)


def shares_of(cuts: Sequence[Cut], costs: Sequence[int]) -> list[int]:
    """Return the rank that works on each tensor: the costliest first, to the least busy rank.

    No rank has more than the mean and one tensor.

    >>> shares_of([Cut((), 0, 2, 0)] * 4, [512, 64, 64, 512])
    [0, 0, 1, 1]
    """
    owners, loads = [0] * len(costs), {cut.groups: [0] * cut.ranks for cut in cuts}
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load = loads[cuts[index].groups]
        owners[index] = load.index(min(load))
        load[owners[index]] += costs[index]
    return owners


def wholes_of(
    tensors: Sequence[Any], cuts: Sequence[Cut], owners: Sequence[int]
) -> dict[int, Tensor]:
    """Gather the whole tensors of this rank, by place: one exchange per group and dtype."""
    wholes: dict[int, Tensor] = {}
    kinds = [(cut.groups, tensor.dtype) for cut, tensor in zip(cuts, tensors, strict=True)]
    for places in in_stacks(range(len(kinds)), lambda place: kinds[place], lambda _: len(kinds)):
        cut = cuts[places[0]]
        ranks = range(cut.ranks)
        by_owner = [[place for place in places if owners[place] == rank] for rank in ranks]
        mine = by_owner[cut.rank]
        sent = [[tensors[place].to_local().detach() for place in part] for part in by_owner]
        shapes = [[cuts[i].shape(tensors[i].shape, rank) for i in mine] for rank in ranks]
        pairs = zip(mine, *_exchange(cut, sent, shapes), strict=True)
        wholes |= {place: torch.cat(parts, cuts[place].dim) for place, *parts in pairs}
    return wholes


def write_shards_(
    tensors: Sequence[Any],
    cuts: Sequence[Cut],
    owners: Sequence[int],
    wholes: Mapping[int, Tensor],
    *,
    notes: Sequence[Sequence[float]] = (),
    width: int = 0,
) -> Tensor:
    """Write this rank's whole tensors to the shards of all ranks, in one exchange.

    All have one group and dtype; ``wholes`` is by place, in order. Each sends its row of ``notes``
    (``width`` numbers) along; those of all ranks are returned, by owners, in float64.
    """
    ranks, dtype = range(cuts[0].ranks), tensors[0].dtype
    parts = [tensor.chunk(len(ranks), cuts[i].dim) for i, tensor in wholes.items()]
    head = torch.tensor(notes, dtype=torch.float64, device=tensors[0].device).view(-1).view(dtype)
    sent = [[head, *(part[rank] for part in parts if rank < len(part))] for rank in ranks]
    local = [tensor.to_local().detach() for tensor in tensors]
    shards = [[local[i] for i, owner in enumerate(owners) if owner == rank] for rank in ranks]
    size = width * torch.float64.itemsize // dtype.itemsize
    shapes = [[(size * len(part),), *(shard.shape for shard in part)] for part in shards]
    arrived = _exchange(cuts[0], sent, shapes)
    values = [value for _, *values in arrived for value in values]
    torch._foreach_copy_([shard for part in shards for shard in part], values)
    return torch.cat([head for head, *_ in arrived]).view(torch.float64)


def _exchange(
    cut: Cut, sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Sequence[int]]]
) -> list[list[Tensor]]:
    """Send each rank its tensors in one buffer; return what arrives, in these shapes."""
    flat = torch.cat([tensor.reshape(-1) for part in sent for tensor in part])
    if cut.ranks > 1:
        sizes = [sum(map(math.prod, part)) for part in shapes]
        arrived = flat.new_empty(sum(sizes))
        dist.all_to_all_single(
            arrived.view(torch.uint8),  # which every backend can send
            flat.view(torch.uint8),
            [size * flat.itemsize for size in sizes],
            [sum(tensor.nbytes for tensor in part) for part in sent],
            group=cut.groups[0],
        )
        flat = arrived
    pieces = iter(flat.split([math.prod(shape) for part in shapes for shape in part]))
    return [[next(pieces).view(*shape) for shape in part] for part in shapes]
