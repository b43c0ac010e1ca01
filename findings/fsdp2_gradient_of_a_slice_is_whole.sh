#!/usr/bin/env bash
# Guess: the gradient of a parameter in shards lies as the parameter does, whatever the loss reads of it.
# Fact: if a loss reads a slice along the dimension that is cut (a penalty on the query rows of a fused weight), torch
# gathers for the slice, and the gradient that arrives is replicated: whole on every rank. The next backward pass through
# the FSDP2 module raises, as it adds its shard to that gradient. A slice of full_tensor() gives a gradient in shards.
# Bites: whoever regularises or probes parts of fused weights (in_proj_weight, qkv_proj, gate_up_proj) or experts of a
# stack after fully_shard.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check install --quiet torch==2.13.0 numpy==2.4.6

cat > "$folder/slices.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

READERS = {
    "all of it": lambda weight: weight,
    "a slice": lambda weight: weight[:3],
    "a slice of full_tensor()": lambda weight: weight.full_tensor()[:3],
}


def work(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found = {}
    for name, read in READERS.items():
        model = fully_shard(nn.Linear(4, 6, bias=False))
        read(model.weight).square().sum().backward()
        shape = tuple(model.weight.grad.to_local().shape)
        try:
            model(torch.ones(2, 4)).sum().backward()
            then = "works"
        except RuntimeError as error:
            then = f"raises: {error}"
        found[name] = shape, then
        if rank == 0:
            print(f"{name}: local weight (3, 4), local gradient {shape}; the next backward pass {then}")
    dist.barrier()
    dist.destroy_process_group()
    assert found["all of it"] == found["a slice of full_tensor()"] == ((3, 4), "works"), found
    assert found["a slice"][0] == (6, 4) and "must match the size" in found["a slice"][1], found


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, args=(sys.argv[1],), nprocs=2)
PYTHON
"$folder/venv/bin/python" -c "import torch; print('torch', torch.__version__)"
"$folder/venv/bin/python" -W ignore "$folder/slices.py" "$folder/store"
