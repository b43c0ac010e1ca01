"""Sharded tensors behind the verbs of plain ones, on a mesh of one process."""

import pytest
import torch
from tests.support.one_mesh import one_mesh
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from wellposed.linalg import cut_like, gathered, is_sharded, mean_over_ranks, mesh_of, read, write_


@pytest.fixture(params=[(1,), (1, 1)], ids=["line", "grid"])
def mesh(request):
    with one_mesh(*request.param) as meshes:
        yield meshes


def test_reading_and_writing(mesh):
    values = torch.randn(5, 3)
    for placement in (Shard(0), Shard(1), Replicate()):
        spread = nn.Parameter(distribute_tensor(values.clone(), mesh, [placement] * mesh.ndim))
        assert is_sharded(spread)
        assert type(gathered(spread)) is torch.Tensor
        assert gathered(spread).requires_grad
        assert not read(spread).requires_grad
        assert torch.equal(read(spread), values)
        cut = cut_like(spread, 2 * values)
        assert isinstance(cut, DTensor)
        assert cut.placements == spread.placements
        assert torch.equal(cut.full_tensor(), 2 * values)
        write_(spread, 3 * values.double())
        assert spread.dtype == torch.float32
        assert torch.equal(read(spread), 3 * values)


def test_plain_tensors_are_themselves():
    plain = nn.Parameter(torch.randn(2, 2))
    assert not is_sharded(plain)
    assert gathered(plain) is plain
    assert torch.equal(read(plain), plain.detach())
    assert not read(plain).requires_grad
    other = torch.ones(2, 2)
    assert cut_like(plain, other) is other
    write_(plain, other.double())
    assert torch.equal(plain.detach(), other)
    assert mean_over_ranks(other, mesh_of([plain])) is other


def test_of_one_rank_the_mean_is_its_own(mesh):
    spread = distribute_tensor(torch.randn(4, 2), mesh, [Shard(0)] * mesh.ndim)
    value = torch.tensor(2.0, requires_grad=True)
    for weights in ([spread], [torch.zeros(2), spread]):
        mean = mean_over_ranks(value, mesh_of(weights))
        assert mean.item() == 2.0
        (slope,) = torch.autograd.grad(3 * mean, value)
        assert slope.item() == 3.0
