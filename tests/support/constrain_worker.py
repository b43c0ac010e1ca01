"""Trains one constrained model as one process, DDP x 2 and FSDP2 x 2 (gloo), and writes what
happened as JSON.

Run by test_sharded_weights.py: ``python -m tests.support.constrain_worker OUT``.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tests.support.constrained import NAMES, Mixed, problem
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from wellposed.constrain import constrain_

WORLD = 2
STEPS = 6
WIDTH = 7
"""A size that two ranks cut unevenly."""


class Attending(nn.Module):
    """One layer of attention over five tokens that are made from a row of numbers."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Linear(WIDTH, 40)
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True, bias=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.layer(self.tokens(x).unflatten(-1, (5, 8))).mean(1))


def train(kind, rank):
    torch.manual_seed(0)
    plain = Attending() if "logits" in kind else Mixed(WIDTH)
    plain.to(torch.bfloat16 if kind.endswith("bf16") else torch.float32)
    x, y = problem(WIDTH, rows=16)
    model = plain
    if not kind.startswith("single"):
        x, y = x.chunk(WORLD)[rank], y.chunk(WORLD)[rank]
    if kind.startswith("ddp"):
        model = nn.parallel.DistributedDataParallel(plain)
    if kind.startswith("fsdp2"):
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in (plain.get_submodule(name) for name in NAMES):
            fully_shard(layer, mesh=mesh)
        model = fully_shard(plain, mesh=mesh)
    decay = 0.1 if "decay" in kind else 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, weight_decay=decay)
    if "spectral" in kind:
        handle = constrain_(model, optimizer, where=NAMES, to="spectral", bound=0.8)
    elif "logits" in kind:
        handle = constrain_(model, optimizer, to="logits", bound=0.1, batch=x)
    elif "columns" in kind:
        handle = constrain_(model, optimizer, where=NAMES, to="columns", bound=0.8)
    else:
        handle = constrain_(model, optimizer, where=NAMES)
    losses, errors = [], {}
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x.to(plain.head.weight.dtype)).float(), y)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        if not kind.startswith("single"):
            dist.all_reduce(total)
            total /= WORLD
        losses.append(float(total))
        errors = errors if errors and "logits" in kind else handle.error().by_path
    weights = {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).float().tolist()
        for name, value in plain.state_dict().items()
    }
    marks = 0
    if kind == "fsdp2":
        state = get_optimizer_state_dict(model, optimizer)
        marks = sum("wellposed_lie_coordinates" in part for part in state["state"].values())
    handle.remove()
    return {"losses": losses, "weights": weights, "errors": errors, "marks": marks}


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    kinds = ["single", "ddp", "fsdp2", "single bf16", "fsdp2 bf16", "single decay", "fsdp2 decay"]
    kinds += [f"{way} {to}" for to in ("spectral", "columns") for way in ("single", "ddp", "fsdp2")]
    kinds += ["single logits", "ddp logits"]
    found = {kind: train(kind, rank) for kind in kinds}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, args=(sys.argv[1],), nprocs=WORLD)
