"""DDP and FSDP2 over two processes give the losses and gradients of one."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.support.penalized import batch, bert, step
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from wellposed.functional import gram_penalty, qr_penalty
from wellposed.penalize import OrthogonalityPenalty

STRENGTHS = {"affinity": 0.3, "attention": 0.7, "feedforward": 1.1, "embedding": 0.2}


def model_and_batch():
    torch.manual_seed(3)
    return bert().double(), batch(4)


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def take_step(kind, rank):
    """One step on this rank's half of the batch; the mean loss and the whole gradients."""
    model, inputs = model_and_batch()
    wrapped = model
    if kind == "fsdp2":
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        for layer in model.encoder.layer:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    penalty = OrthogonalityPenalty(model, **STRENGTHS, form="paper")
    half = {name: value[2 * rank : 2 * rank + 2] for name, value in inputs.items()}
    loss, gradients = step(wrapped, penalty, half)
    dist.all_reduce(loss)
    named = {name.removeprefix("module."): full(slope) for name, slope in gradients.items()}
    return {"loss": loss / 2, "gradients": named}


def gathers_in(calls):
    return sum(count for kind, count in calls.get_comm_counts().items() if "gather" in str(kind))


def penalise_shards():
    """Values and gradients on shards in either direction, and the gathers that took place."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    found, gathers = [], 0
    for shape in ((7, 4), (3, 6), (5, 5)):
        whole = torch.randn(shape, dtype=torch.float64)
        for placement in (Shard(0), Shard(1), Replicate()):
            weight = distribute_tensor(whole, mesh, [placement]).requires_grad_()
            with CommDebugMode() as calls:
                value = gram_penalty([weight, 2 * weight], squared=False)
                value.backward()
            gathers += gathers_in(calls)
            found.append((whole, value.detach(), full(weight.grad)))
    with CommDebugMode() as calls:
        qr_penalty(distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)]))
    return {"found": found, "gathers": gathers, "gathers of qr": gathers_in(calls)}


def worker(rank, store, out):
    torch.set_num_threads(1)
    wait = timedelta(seconds=200)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=wait
    )
    results = {kind: take_step(kind, rank) for kind in ("ddp", "fsdp2")}
    results["shards"] = penalise_shards()
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
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_equal_one(kind, results):
    found = results[kind]
    model, inputs = model_and_batch()
    loss, expected = step(model, OrthogonalityPenalty(model, **STRENGTHS, form="paper"), inputs)
    torch.testing.assert_close(found["loss"], loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(found["gradients"], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_shards_in_either_direction_without_gathering(results):
    shards = results["shards"]
    assert shards["gathers"] == 0
    assert shards["gathers of qr"] > 0  # so the count can see a gather
    assert len(shards["found"]) == 9
    for whole, value, gradient in shards["found"]:
        leaf = whole.requires_grad_()
        stack = torch.cat([leaf, 2 * leaf])
        expected = (stack.T @ stack - torch.eye(leaf.shape[1])).norm()
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
        (exact,) = torch.autograd.grad(expected, leaf)
        torch.testing.assert_close(gradient, exact, rtol=1e-10, atol=1e-12)
