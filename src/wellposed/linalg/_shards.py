"""DTensors in parts (FSDP2, tensor parallel): cuts, owners, and the exchanges of shards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


def cut_of(tensor: Tensor, *, once: bool = True) -> Cut | None:
    """Return how a tensor is cut; None if whole, a partial sum, or cut along several dimensions.

    Unless ``once`` is False, also None if it is cut over several mesh dimensions or in strides.
    """
    if not is_sharded(tensor):
        return None
    mesh = tensor.device_mesh
    places = tensor.placements
    over = [index for index, placement in enumerate(places) if not placement.is_replicate()]
    dims: set[Any] = {getattr(places[index], "dim", None) for index in over}
    if len(dims) != 1 or None in dims:
        return None
    if once and [type(places[index]).__name__ for index in over] != ["Shard"]:
        return None

    groups = tuple(map(mesh.get_group, over))
    ranks = math.prod(map(mesh.size, over))
    return Cut(groups, dims.pop(), ranks, mesh.get_local_rank(over[0]))


@dataclass(frozen=True)
class Layout:
    """How a tensor in shards, or a matrix inside one, lies on the ranks; all as stored.

    Args:
        cut: how the tensor is cut.
        stored: shape of the tensor.
        entry: index of the matrix in a stack; None for no stack.
        rows: range of the dimension ``axis`` that the matrix covers; None for all.
        axis: -2, or -1 for a weight that is stored transposed.

    >>> fused = Layout(Cut((), 0, 2, 0), (12, 4), rows=range(4, 8))  # six rows a rank
    >>> fused.shape(0), fused.shape(1)
    ((2, 4), (2, 4))
    >>> Layout(Cut((), 0, 2, 0), (6, 4, 4), entry=5).holder
    1
    """

    cut: Cut
    stored: tuple[int, ...]
    entry: int | None = None
    rows: range | None = None
    axis: int = -2

    @property
    def _first(self) -> int:
        """The dimension of the tensor that is the first of the matrix."""
        return 0 if self.entry is None else 1

    @property
    def holder(self) -> int | None:
        """The rank that has the whole matrix, if a stack is cut between its matrices."""
        if self.entry is None or self.cut.dim != 0:
            return None
        return self.entry // -(-self.stored[0] // self.cut.ranks)

    @property
    def dim(self) -> int:
        """The dimension of the matrix along which the parts of all ranks are joined."""
        return max(0, self.cut.dim - self._first)

    def shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the part of a rank."""
        shape = [*self.stored[self._first :]]
        if self.rows is not None:
            shape[self.axis] = len(self.rows)
        if self.holder is not None:
            shape[0] = shape[0] if rank == self.holder else 0
        else:
            shape[self.dim] = len(self._taken(rank))
        return tuple(shape)

    def part(self, local: Tensor) -> Tensor:
        """Return the part of the matrix in this rank's shard of the tensor: a view."""
        cut = self.cut
        first = 0
        if self.holder is not None:
            if cut.rank != self.holder:
                return local.new_empty(self.shape(cut.rank))
            first = cut.span(self.stored[0], cut.rank)[0]

        matrix = local if self.entry is None else local[self.entry - first]
        if self.rows is None:
            return matrix

        is_cut_here = self.holder is None and self.dim == matrix.ndim + self.axis
        start = cut.span(self.stored[cut.dim], cut.rank)[0] if is_cut_here else 0
        rows = self._taken(cut.rank) if is_cut_here else self.rows
        part = slice(rows.start - start, rows.stop - start, rows.step)
        return matrix[part] if self.axis == -2 else matrix[:, part]

    def split(self, matrix: Tensor) -> list[Tensor]:
        """Return the parts of all ranks of the whole matrix: views."""
        sizes = [self.shape(rank)[self.dim] for rank in range(self.cut.ranks)]
        return [*matrix.split(sizes, self.dim)]

    def _taken(self, rank: int) -> range:
        """Return which indices of the dimension that is cut a rank has of the matrix."""
        start, stop = self.cut.span(self.stored[self.cut.dim], rank)
        if self.rows is None or self.cut.dim != len(self.stored) + self.axis:
            return range(start, stop)
        rows = self.rows
        first = rows.start + max(0, -(-(start - rows.start) // rows.step)) * rows.step
        return range(first, max(first, min(stop, rows.stop)), rows.step)


def layout_of(
    tensor: Tensor, *, entry: int | None = None, rows: range | None = None, axis: int = -2
) -> Layout | None:
    """Return the layout of a tensor, or of a matrix in it; None as `cut_of` does."""
    cut = cut_of(tensor)
    return None if cut is None else Layout(cut, tuple(tensor.shape), entry, rows, axis)


def cost_of(shape: Sequence[int]) -> int:
    """Return what the work on a matrix costs: ``rows * columns * min(rows, columns)``."""
    return math.prod(shape) * min(shape)


def shares_of(layouts: Sequence[Layout], costs: Sequence[int]) -> list[int]:
    """Return the rank that works on each matrix: the costliest first, to the least busy rank.

    A matrix that lies whole on one rank stays there. No rank has more than the mean and one other.

    >>> shares_of([Layout(Cut((), 0, 2, 0), (8, 8))] * 4, [512, 64, 64, 512])
    [0, 0, 1, 1]
    """
    owners = [layout.holder for layout in layouts]
    loads = {layout.cut.groups: [0] * layout.cut.ranks for layout in layouts}
    order = sorted(range(len(costs)), key=lambda index: (owners[index] is None, -costs[index]))
    result = [0] * len(costs)
    for index in order:
        load = loads[layouts[index].cut.groups]
        owner = owners[index]
        result[index] = load.index(min(load)) if owner is None else owner
        load[result[index]] += costs[index]
    return result


def wholes_of(
    tensors: Sequence[Any], layouts: Sequence[Layout], owners: Sequence[int]
) -> dict[int, Tensor]:
    """Gather the whole matrices of this rank, by place: one exchange per group and dtype.

    ``tensors`` are DTensors, each with its matrix's layout in ``layouts``.
    """
    wholes: dict[int, Tensor] = {}
    pairs = zip(layouts, tensors, strict=True)
    kinds = [(layout.cut.groups, tensor.dtype) for layout, tensor in pairs]
    for places in in_stacks(range(len(kinds)), lambda index: kinds[index], lambda _: len(kinds)):
        cut = layouts[places[0]].cut
        ranks = range(cut.ranks)
        by_owner = [[index for index in places if owners[index] == rank] for rank in ranks]
        mine = by_owner[cut.rank]
        sent = [[_local(tensors[i], layouts[i]) for i in part] for part in by_owner]
        shapes = [[layouts[i].shape(rank) for i in mine] for rank in ranks]
        arrived = zip(mine, *_exchange(cut, sent, shapes), strict=True)
        wholes |= {index: torch.cat(parts, layouts[index].dim) for index, *parts in arrived}

    return wholes


def _local(tensor: Any, layout: Layout) -> Tensor:
    return layout.part(tensor.to_local().detach())


def write_shards_(
    tensors: Sequence[Any],
    layouts: Sequence[Layout],
    owners: Sequence[int],
    wholes: Mapping[int, Tensor],
    *,
    notes: Sequence[Sequence[float]] = (),
    width: int = 0,
) -> Tensor:
    """Write this rank's whole matrices to the shards of all ranks, in one exchange.

    All have one group and dtype; ``wholes`` is by place, in order. Each sends its row of ``notes``
    (``width`` numbers) along; those of all ranks are returned, by owners, in float64.
    """
    cut = layouts[0].cut
    dtype = tensors[0].dtype
    ranks = range(cut.ranks)
    parts = [layouts[i].split(matrix) for i, matrix in wholes.items()]
    head = torch.tensor(notes, dtype=torch.float64, device=tensors[0].device).view(-1).view(dtype)
    sent = [[head, *(part[rank] for part in parts)] for rank in ranks]
    local = [_local(tensor, layout) for tensor, layout in zip(tensors, layouts, strict=True)]
    shards = [[local[i] for i, owner in enumerate(owners) if owner == rank] for rank in ranks]
    size = width * torch.float64.itemsize // dtype.itemsize
    shapes = [[(size * len(part),), *(shard.shape for shard in part)] for part in shards]
    arrived = _exchange(cut, sent, shapes)
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
