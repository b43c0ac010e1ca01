"""Constrains and penalises stacks of experts that two processes cut between experts, and writes how far
the result is from that of one process as JSON.

Run by test_expert_stacks.py: ``python -m tests.support.expert_parallel_worker OUT``.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tests.penalize.test_experts import mixtral
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from wellposed import OrthogonalityPenalty
from wellposed.constrain import constrain_

ROLES = ("feedforward_in", "feedforward_gate", "feedforward_out")


def cut_experts(model, mesh):
    """Distribute every stack along the axis of its experts."""
    for path, weight in list(model.named_parameters()):
        if weight.ndim == 3:
            owner, _, name = path.rpartition(".")
            cut = distribute_tensor(weight.detach(), mesh, [Shard(0)])
            setattr(model.get_submodule(owner), name, nn.Parameter(cut))


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def stepped(mesh, to):
    """The stacks after three steps of given gradients, and the gradients of a penalty there."""
    torch.manual_seed(0)
    model = mixtral(experts=3)  # one process has two, the other one
    if mesh is not None:
        cut_experts(model, mesh)
    weights = [weight for weight in model.parameters() if weight.ndim == 3]
    optimizer = torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.0)
    constrain_(model, optimizer, where=ROLES, to=to)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for weight in weights:
            gradient = torch.randn(weight.shape, generator=generator)
            is_cut = mesh is not None
            weight.grad = distribute_tensor(gradient, mesh, [Shard(0)]) if is_cut else gradient
        optimizer.step()
    optimizer.zero_grad()
    penalty = OrthogonalityPenalty(model, feedforward=1.0)()
    penalty.backward()
    values = [full(weight.detach()) for weight in weights]
    slopes = [full(weight.grad) for weight in weights]
    return [*values, *slopes, penalty.detach()]


def main(out):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    distances = {}
    for to in ("orthogonal", "spectral"):
        pairs = zip(stepped(None, to), stepped(mesh, to), strict=True)
        distances[to] = [float((one - two).abs().max()) for one, two in pairs]
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(distances), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
