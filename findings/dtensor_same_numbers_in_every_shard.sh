#!/usr/bin/env bash
# Guess: a weight that is sharded on the meta device and then drawn (`fully_shard`, `to_empty`, `nn.init`), with one
# seed on all ranks, is a random matrix of full rank, as in one process.
# Fact: on CPUs (gloo) every rank draws its shard from its own generator. Equal seeds give equal shards: two ranks
# repeat one half, and a 16 x 16 weight has rank 8. `orthogonal_` is spared, as it gathers the matrix first.
# On CUDA a tracker of offsets makes the shards differ.
# Bites: whoever tests sharded training on CPUs, compares it with one process, or measures ranks and conditioning there.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check install --quiet torch==2.13.0 numpy==2.4.6

"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import os
import tempfile

CODE = """
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
mesh = init_device_mesh("cpu", (2,))
if rank == 0:
    print("torch", torch.__version__)

for name in ("normal_", "uniform_", "trunc_normal_", "xavier_uniform_", "kaiming_normal_", "orthogonal_"):
    with torch.device("meta"):
        layer = nn.Linear(16, 16, bias=False)
    fully_shard(layer, mesh=mesh)
    layer.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        getattr(nn.init, name)(layer.weight)
    weight = layer.weight.full_tensor().double()
    found = int(torch.linalg.matrix_rank(weight))
    if rank == 0:
        print(f"{name}: rank {found} of 16, equal halves: {torch.equal(weight[:8], weight[8:])}")
    assert found == (16 if name == "orthogonal_" else 8), name
dist.barrier()
dist.destroy_process_group()
"""
import subprocess
import sys

with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "work.py")
    with open(path, "w") as file:
        file.write(CODE)
    started = [subprocess.Popen([sys.executable, "-W", "ignore", path, str(k), os.path.join(folder, "store")]) for k in range(2)]
    codes = [process.wait(timeout=300) for process in started]
assert codes == [0, 0], codes
PYTHON
