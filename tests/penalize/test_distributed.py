"""DDP and FSDP2 over two processes give the losses and gradients of one."""

from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.support.penalized import batch, bert, step
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

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
    calls = CommDebugMode()
    with calls if kind == "fsdp2" else nullcontext():
        loss, gradients = step(wrapped, penalty, half)
    reduced = sum(
        n
        for kind, n in calls.get_comm_counts().items()
        if "allreduce" in str(kind).replace("_", "")
    )
    dist.all_reduce(loss)
    named = {name.removeprefix("module."): full(slope) for name, slope in gradients.items()}
    return {"loss": loss / 2, "gradients": named, "all-reduces": reduced}


def worker(rank, store, out):
    torch.set_num_threads(1)
    wait = timedelta(seconds=200)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=wait
    )
    results = {kind: take_step(kind, rank) for kind in ("ddp", "fsdp2")}
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
    # Shards of three shapes (the root's embedding is whole after a forward pass): one for the values
    # of each, and one for the gradients.
    assert found["all-reduces"] == (6 if kind == "fsdp2" else 0)
