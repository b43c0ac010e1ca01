"""Weights cut over the processes of a run (FSDP2), one block at a time, and whole copies of the
model they are of."""

from __future__ import annotations

import copy
from collections import Counter

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from wellposed.errors import RoleNotFoundError
from wellposed.linalg.sharded import read
from wellposed.roles import find_roles
from wellposed.roles.layer_paths import split_path
from wellposed.training.config import TrainOptions


class ShardedModel:
    """Cuts the weights of ``model`` in place, and makes whole copies of it with the weights of the
    moment.

    Every method is called by all processes alike, as each gathers what the others hold.
    """

    def __init__(self, model: nn.Module, accelerator: Accelerator) -> None:
        self.model = model
        hollow = {
            id(weight): nn.Parameter(torch.empty_like(weight, device="meta"))
            for weight in model.parameters()
        }
        self._hollow = copy.deepcopy(model, hollow)
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        # Without resharding the weights of the root stay whole after a forward pass, which
        # penalties and checkpoints would then find there.
        for block in _blocks(model):
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)

    def whole(self, *, device: str | torch.device) -> nn.Module:
        """Return a plain copy on ``device`` in the mode of the model; its gradients go nowhere."""
        values: dict[int, object] = {}
        for name, hollow in self._hollow.named_parameters():
            weight = self.model.get_parameter(name)
            values[id(hollow)] = nn.Parameter(read(weight).to(device), weight.requires_grad)
        found = copy.deepcopy(self._hollow, values)
        for name, buffer in self.model.named_buffers():
            found.get_buffer(name).copy_(buffer)
        return found.to(device).train(self.model.training)

    def join_whole(self) -> None:
        """Take part in the gathers of `whole`, which another process calls at this moment; keep
        nothing."""
        for name, _ in self._hollow.named_parameters():
            read(self.model.get_parameter(name))


def is_sharded_run(options: TrainOptions, accelerator: Accelerator) -> bool:
    """Whether weights are cut: asked for, and more than one process to hold them."""
    return options.parallel == "fsdp" and accelerator.num_processes > 1


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers that hold an attention each, but those that share a weight with another
    part of the model."""
    try:
        roles = find_roles(model)
    except RoleNotFoundError:
        return []
    paths = dict.fromkeys(split_path(role.path)[1] for role in roles.attention)
    layers = {
        id(layer): layer for layer in (model.get_submodule(path) for path in paths if path)
    }.values()
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    inside = [
        Counter(id(weight) for _, weight in layer.named_parameters(remove_duplicate=False))
        for layer in layers
    ]
    return [
        layer
        for layer, own in zip(layers, inside, strict=True)
        if all(own[weight] == uses[weight] for weight in own)
    ]
