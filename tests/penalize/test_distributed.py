"""DDP, FSDP2 and tensor parallelism over two processes give the losses and gradients of one, by as many
collectives as there are shapes of weights."""

from collections import Counter
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.support.penalized import batch, bert, step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from wellposed.errors import ConfigError
from wellposed.functional import gram_penalty
from wellposed.penalize import OrthogonalityPenalty

WEIGHTS = {"attention": 0.7, "feedforward": 1.1}
STRENGTHS = {
    "ddp": {"affinity": 0.3, "embedding": 0.2, **WEIGHTS},
    "fsdp2": {"affinity": 0.3, "embedding": 0.2, **WEIGHTS},
    "tensor parallel": WEIGHTS,
}
# Query, key, value and output of all layers together, and feed-forward weights in and out: one
# all-reduce each, of their Gram matrices, and one of the gradient of all. The output weights are cut
# the other way: an exchange (on a CPU, a gather) before, and one behind.
COLLECTIVES = {
    "fsdp2": {"allreduce_": 4, "all_gather_into_tensor": 2},
    "tensor parallel": {"allreduce_": 4, "all_gather_into_tensor": 2},
}
SIZES = [(1, 5), (5, 1), (3, 5), (5, 3), (3, 3)]
"""Of a matrix that two ranks cut unevenly, or of which one holds nothing."""
MATRIX = torch.arange(12.0).reshape(4, 3)
CUT = {"attention.self.query": 0, "attention.self.key": 0, "attention.self.value": 0}
CUT |= {"attention.output.dense": 1, "intermediate.dense": 0, "output.dense": 1}


def model_and_batch():
    torch.manual_seed(3)
    return bert().double(), batch(4)


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def parallel(kind):
    """The model, what runs its forward pass, and the batch."""
    model, inputs = model_and_batch()
    mesh = init_device_mesh("cpu", (2,))
    if kind == "ddp":
        return (
            model,
            nn.parallel.DistributedDataParallel(model, find_unused_parameters=True),
            inputs,
        )
    for layer in model.encoder.layer:
        if kind == "fsdp2":
            fully_shard(layer, mesh=mesh)
        else:
            ways = [ColwiseParallel, RowwiseParallel]
            parallelize_module(layer, mesh, {name: ways[dim]() for name, dim in CUT.items()})
    return model, fully_shard(model, mesh=mesh) if kind == "fsdp2" else model, inputs


def take_step(kind, rank):
    """A step on this rank's part of the batch: the mean loss, the whole gradients; and how often the
    ranks speak in a penalty of weights by itself."""
    model, wrapped, inputs = parallel(kind)
    penalty = OrthogonalityPenalty(model, **STRENGTHS[kind])
    if kind != "tensor parallel":
        inputs = {name: value[2 * rank : 2 * rank + 2] for name, value in inputs.items()}
    loss, gradients = step(wrapped, penalty, inputs)
    named = {name.removeprefix("module."): full(slope) for name, slope in gradients.items()}
    dist.all_reduce(loss)
    calls = CommDebugMode()
    alone = OrthogonalityPenalty(model, **WEIGHTS)
    with calls:
        value = alone()
        value.backward()
    values = [torch.empty_like(value) for _ in range(2)]
    dist.all_gather(values, value.detach())
    counted = Counter({str(call).split(".")[-1]: n for call, n in calls.get_comm_counts().items()})
    return {
        "loss": loss / 2, "gradients": named, "collectives": dict(+counted),
        "apart": (values[0] - values[1]).abs(),
    }  # fmt: skip


def uneven():
    """Gradients of sharded matrices by size and the dimension that is cut."""
    mesh = init_device_mesh("cpu", (2,))
    slopes = {}
    for size in SIZES:
        for dim in (0, 1):
            torch.manual_seed(0)
            weight = distribute_tensor(torch.randn(size, dtype=torch.double), mesh, [Shard(dim)])
            weight.requires_grad_()
            gram_penalty(weight, squared=False).backward()
            slopes[size, dim] = full(weight.grad)
    return slopes


def strided(rank):
    """The penalty of a matrix that FSDP2 cuts on top of tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 1))
    ways = [_StridedShard(0, split_factor=1), Shard(0)]
    weight = DTensor.from_local(MATRIX[2 * rank : 2 * rank + 2], mesh, ways, run_check=False)
    return gram_penalty(weight)


def refused():
    """The message about affinities of which each rank sees some heads alone."""
    model, wrapped, inputs = parallel("tensor parallel")
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    output = wrapped(**inputs)
    try:
        penalty()
    except ConfigError as error:
        return str(error)
    return output


def worker(rank, store, out):
    torch.set_num_threads(1)
    wait = timedelta(seconds=200)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=wait
    )
    results = {kind: take_step(kind, rank) for kind in STRENGTHS}
    results |= {"uneven": uneven(), "strided": strided(rank), "refused": refused()}
    if rank == 0:
        torch.save(results, out)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two-processes")
    mp.spawn(worker, args=(str(folder / "store"), str(folder / "out.pt")), nprocs=2)
    return torch.load(folder / "out.pt")


@pytest.mark.slow
@pytest.mark.parametrize("kind", STRENGTHS)
def test_two_processes_equal_one(kind, results):
    result = results[kind]
    model, inputs = model_and_batch()
    loss, expected = step(model, OrthogonalityPenalty(model, **STRENGTHS[kind]), inputs)
    torch.testing.assert_close(result["loss"], loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(result["gradients"], expected, rtol=1e-9, atol=1e-12)
    assert result["apart"] == 0
    assert result["collectives"] == COLLECTIVES.get(kind, {})


@pytest.mark.slow
def test_uneven_shards_and_ranks_that_hold_nothing(results):
    for (size, _), slope in results["uneven"].items():
        torch.manual_seed(0)
        weight = torch.randn(size, dtype=torch.double, requires_grad=True)
        gram_penalty(weight, squared=False).backward()
        torch.testing.assert_close(slope, weight.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_two_ways_to_cut_the_same_rows(results):
    torch.testing.assert_close(results["strided"], gram_penalty(MATRIX))


@pytest.mark.slow
def test_affinities_of_tensor_parallel_attention_are_refused(results):
    assert "encoder.layer.0.attention: 2 of 4" in results["refused"]
