"""The parts that ranks have of a matrix inside a tensor in shards make up that matrix, whatever is cut."""

import itertools

import pytest
import torch

from wellposed.linalg import Cut, Layout

RANGES = [None, range(6), range(4, 11), range(1, 12, 2), range(2, 12, 3), range(11, 12)]


def shard(tensor, cut):
    """What torch gives a rank: equal pieces, until nothing is left."""
    pieces = tensor.chunk(cut.ranks, cut.dim)
    empty = tensor.narrow(cut.dim, 0, 0)
    return pieces[cut.rank] if cut.rank < len(pieces) else empty


@pytest.mark.parametrize("rows", RANGES, ids=str)
@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize(("shape", "entry"), [((12, 12), None), ((5, 12, 12), 0), ((5, 12, 12), 4)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7, 16])
def test_parts_of_all_ranks_make_the_matrix(ranks, shape, entry, axis, rows):
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    matrix = tensor if entry is None else tensor[entry]
    if rows is not None:
        index = torch.tensor([*rows])
        matrix = matrix.index_select(axis, index)
    for dim in range(len(shape)):
        parts = []
        for rank in range(ranks):
            cut = Cut((), dim, ranks, rank)
            layout = Layout(cut, shape, entry, rows, axis)
            part = layout.part(shard(tensor, cut))
            assert tuple(part.shape) == layout.shape(rank)
            assert torch.equal(layout.split(matrix)[rank], part)
            is_whole = part.numel() == matrix.numel()
            assert layout.holder is None or is_whole == (layout.holder == rank)
            parts.append(part)
        assert torch.equal(torch.cat(parts, layout.dim), matrix), (dim, ranks)


def test_a_part_is_a_view_of_the_shard():
    tensor = torch.zeros(4, 6, 6)
    for entry, rows in itertools.product((0, 1), (None, range(1, 6, 2))):
        layout = Layout(Cut((), 0, 2, 0), (4, 6, 6), entry, rows)
        layout.part(tensor[:2]).fill_(1.0)
        assert float(tensor[entry].sum()) == 6 * (6 if rows is None else len(rows))
        tensor.zero_()
