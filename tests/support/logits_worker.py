"""Trains attention whose logits are held as one process, DDP x 2 and FSDP2 x 2 (gloo); writes what
happened as JSON.

Run by test_logits.py: ``python -m tests.support.logits_worker OUT``.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tests.support.many_families import model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from wellposed.constrain import constrain_

WORLD = 2
STEPS = 5
KINDS = ("single", "ddp", "fsdp2", "fsdp2 whole")


class Attending(nn.Module):
    """A fused weight with biases, which two processes cut inside of a head; and queries and keys of one
    row each, of which one process holds nothing."""

    def __init__(self):
        super().__init__()
        self.wide = nn.TransformerEncoderLayer(9, 3, 8, dropout=0.0, batch_first=True)
        self.narrow = nn.MultiheadAttention(1, 1, kdim=9, vdim=9, batch_first=True)

    def forward(self, x):
        wide = self.wide(x)
        return wide + self.narrow(wide[..., :1], wide, wide, need_weights=False)[0]


def mixed():
    return Attending(), torch.randn(4, 5, 9), lambda output: output.square().mean()


def conv1d():
    built = model("GPT2", vocab_size=40, n_embd=18, n_layer=2, n_head=3)()
    built = built.eval()  # without dropout
    return built, torch.randint(0, 40, (4, 7)), lambda output: output[0].square().mean()


def train(build, kind, rank):
    torch.manual_seed(0)
    built, x, loss = build()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    trained = built
    if kind != "single":
        x = x.chunk(WORLD)[rank]
    if kind == "ddp":
        trained = nn.parallel.DistributedDataParallel(built)
    if kind.startswith("fsdp2"):
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in reversed([*built.modules()]) if kind == "fsdp2" else ():
            if type(layer).__name__ in (
                "TransformerEncoderLayer",
                "MultiheadAttention",
                "GPT2Block",
            ):
                fully_shard(layer, mesh=mesh)
        trained = fully_shard(built, mesh=mesh)
    optimizer = torch.optim.SGD(trained.parameters(), lr=1e-2, momentum=0.9)
    handle = constrain_(trained, optimizer, to="logits", bound=0.5, batch=x)
    errors = []
    collectives = 0
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(trained(x)).backward()
        with CommDebugMode() as counted:
            optimizer.step()
        collectives = counted.get_total_counts()
        errors.append(handle.error().worst)
    weights = {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).tolist()
        for name, value in built.state_dict().items()
    }
    handle.remove()
    return {"errors": errors, "weights": weights, "collectives": collectives}


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    results = {
        f"{b.__name__} {kind}": train(b, kind, rank) for b in (mixed, conv1d) for kind in KINDS
    }
    Path(folder, f"rank{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, args=(sys.argv[1],), nprocs=WORLD)
