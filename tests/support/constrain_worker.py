"""Trains one constrained model as one process, DDP x 2 and FSDP2 x 2 (gloo), or FSDP2, hybrid and tensor
parallel x 4, and writes what happened as JSON.

Run by test_sharded_weights.py: ``python -m tests.support.constrain_worker OUT PROCESSES``.
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
from torch.distributed.tensor import Replicate, parallel
from torch.distributed.tensor.debug import CommDebugMode

from wellposed.constrain import constrain_
from wellposed.errors import ConvergenceError

STEPS = 6
WIDTHS = {2: 7, 4: 5}
"""Sizes that the ranks cut unevenly; of 5 rows the last of four ranks has none."""
OPTIMIZERS = {
    "adamw": lambda p, decay: torch.optim.AdamW(p, lr=2e-2, weight_decay=decay),
    "sgd": lambda p, decay: torch.optim.SGD(p, lr=5e-2, weight_decay=decay),
    "momentum": lambda p, decay: torch.optim.SGD(p, lr=2e-2, momentum=0.9, weight_decay=decay),
}

KINDS = {
    2: [
        *(
            f"{way}{end}"
            for end in ("", " spectral", " columns")
            for way in ("single", "ddp", "fsdp2")
        ),
        *(
            f"{way} {end}"
            for end in ("bf16", "decay", "momentum placed")
            for way in ("single", "fsdp2")
        ),
    ],
    4: [
        *(f"{way}{end}" for end in ("", " spectral") for way in ("single", "fsdp2", "hsdp")),
        *(f"{way} {end}" for end in ("columns decay", "bf16 sgd") for way in ("single", "fsdp2")),
        *(f"{way} wide8{end}" for end in ("", " spectral") for way in ("single", "tp", "tp+fsdp2")),
    ],
}


def shard(plain, way):
    """Return the model as one way of training cuts or copies it, and the ranks that see other rows."""
    world = dist.get_world_size()
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(plain), world
    if way == "fsdp2":
        mesh = init_device_mesh("cpu", (world,))
    else:
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
    if way.startswith("tp"):
        column = parallel.ColwiseParallel(output_layouts=Replicate())
        row = parallel.RowwiseParallel(input_layouts=Replicate())
        plan = {"square": column, "tall": column, "wide": row}
        parallel.parallelize_module(plain, mesh["inner"], plan)
        mesh = mesh["outer"]
    if way == "tp":
        return plain, 1
    for layer in (plain.get_submodule(name) for name in NAMES):
        fully_shard(layer, mesh=mesh)
    return fully_shard(plain, mesh=mesh), world if way in ("fsdp2", "hsdp") else 2


def train(kind, rank):
    torch.manual_seed(0)
    way = kind.split()[0]
    world = dist.get_world_size()
    width = 8 if "wide8" in kind else WIDTHS[world]
    plain = Mixed(width)
    plain.to(torch.bfloat16 if "bf16" in kind else torch.float32)
    x, y = problem(width, rows=16)
    model, parts = (plain, 1) if way == "single" else shard(plain, way)
    part = rank * parts // world
    x = x.chunk(parts)[part]
    y = y.chunk(parts)[part]
    name = next((name for name in OPTIMIZERS if name in kind), "adamw")
    optimizer = OPTIMIZERS[name](model.parameters(), 0.1 if "decay" in kind else 0.0)
    if "spectral" in kind:
        handle = constrain_(model, optimizer, where=NAMES, to="spectral", bound=0.8)
    elif "columns" in kind:
        handle = constrain_(model, optimizer, where=NAMES, to="columns", bound=0.8)
    else:
        handle = constrain_(model, optimizer, where=NAMES)
    losses = []
    errors = {}
    collectives = {}
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x.to(plain.head.weight.dtype)).float(), y)
        loss.backward()
        if "placed" in kind and way == "fsdp2":
            for layer in map(plain.get_submodule, NAMES):
                gradient = layer.weight.grad
                layer.weight.grad = gradient.redistribute(placements=[Replicate()])
        with CommDebugMode() as counted:
            optimizer.step()
        collectives = {str(op).split(".")[-1]: n for op, n in counted.get_comm_counts().items()}
        total = loss.detach().clone()
        if way != "single":
            dist.all_reduce(total)
            total /= world
        losses.append(float(total))
        errors = handle.error().by_path
    weights = {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).float().tolist()
        for name, value in plain.state_dict().items()
    }
    marks = 0
    if kind == "fsdp2":
        state = get_optimizer_state_dict(model, optimizer)
        marks = sum("wellposed_lie_coordinates" in part for part in state["state"].values())
    result = {"losses": losses, "weights": weights, "errors": errors, "marks": marks}
    return {
        **result,
        "collectives": collectives,
        "broken": broken_step(optimizer, plain, handle, rank == world - 1),
    }


def broken_step(optimizer, plain, handle, is_last):
    """Return what is raised after a gradient that is not finite on the last rank, then by a good one."""
    lines = []
    for value in (float("nan"), 0.0):
        for parameter in plain.parameters():
            local = parameter.grad.to_local() if hasattr(parameter, "to_local") else parameter.grad
            local.fill_(value if is_last else 0.0)
        try:
            optimizer.step()
        except ConvergenceError as error:
            lines.append(str(error))
        # Those that could not be retracted are those of before the step, on each rank.
        for weight in handle.weights:
            assert all(bool(part.isfinite().all()) for part in weight.stepped()), weight.path
    handle.remove()
    return lines


def work(rank, folder, world):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    results = {kind: train(kind, rank) for kind in KINDS[world]}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, args=(sys.argv[1], int(sys.argv[2])), nprocs=int(sys.argv[2]))
