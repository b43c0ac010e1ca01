"""DTensors (FSDP2, tensor parallel) in parts: how a tensor is cut, which rank works on which whole
one, and the exchanges that bring shards there and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from wellposed.linalg._tensors import in_stacks, is_sharded


class Cut(NamedTuple):
    """The groups of processes over which a tensor is cut, along which of its dimensions, in how many
    parts, and which of them this process holds (of the first group)."""

    groups: tuple[Any, ...]
    dim: int
    ranks: int
    rank: int

    def span(self, length: int, rank: int) -> tuple[int, int]:
        """Return the half-open range that a rank holds: equal pieces, until nothing is left."""
        piece = -(-length // self.ranks)
        return min(rank * piece, length), min((rank + 1) * piece, length)

    def shape(self, whole: Sequence[int], rank: int) -> tuple[int, ...]:
        """Return the shape of the part that a rank holds."""
        start, stop = self.span(whole[self.dim], rank)
        return (*whole[: self.dim], stop - start, *whole[self.dim + 1 :])


def cut_of(tensor: Tensor, *, once: bool = True) -> Cut | None:
    """Return how a tensor is cut; None if it is whole, a partial sum, cut along several dimensions of
    its own, or, unless ``once`` is False, over several of a mesh or in strides."""
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
    """Return the rank that works on each tensor: the costliest first, each to the rank of its group
    with the least work so far. No rank has more than the mean and one tensor.

    >>> llama = [(4096, 4096), (1024, 4096), (1024, 4096), (14336, 4096), (4096, 14336)] * 32
    >>> costs, loads, cut = [cost_of(shape) for shape in llama], [0] * 8, Cut((), 0, 8, 0)
    >>> for cost, owner in zip(costs, shares_of([cut] * 160, costs), strict=True):
    ...     loads[owner] += cost
    >>> max(loads) <= 1.1 * sum(loads) / 8
    True
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
    """Return the whole tensors whose owner is this rank, by their places, in one exchange for each
    group and dtype. All are cut once."""
    wholes: dict[int, Tensor] = {}
    kinds = [(cut.groups, tensor.dtype) for cut, tensor in zip(cuts, tensors, strict=True)]
    for places in in_stacks(range(len(kinds)), lambda place: kinds[place], lambda _: len(kinds)):
        cut = cuts[places[0]]
        ranks = range(cut.ranks)
        by_owner = [[place for place in places if owners[place] == rank] for rank in ranks]
        mine = by_owner[cut.rank]
        sent = [[tensors[place].to_local().detach() for place in part] for part in by_owner]
        shapes = [[cuts[each].shape(tensors[each].shape, rank) for each in mine] for rank in ranks]
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
    """Write whole tensors into the shards that all ranks hold, in one exchange.

    All are of one group and dtype; ``wholes`` are those whose owner is this rank, by their places in
    order. With each travel ``width`` numbers, its row of ``notes``: returned are those of all
    ranks, by owners, in float64.
    """
    ranks, dtype = range(cuts[0].ranks), tensors[0].dtype
    parts = [whole.chunk(len(ranks), cuts[place].dim) for place, whole in wholes.items()]
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
    """Send a list of tensors to each rank, all of one dtype, in one buffer; return what comes from
    each, in these shapes."""
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
