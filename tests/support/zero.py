"""Weights as DeepSpeed ZeRO leaves them, without DeepSpeed."""

import torch
from torch import nn


def in_parts_(model):
    """As after ``deepspeed.initialize`` at stage 3: each weight is empty, its part lies beside it."""
    for number, weight in enumerate(model.parameters()):
        weight.ds_id = number
        weight.ds_shape = weight.shape
        weight.ds_numel = weight.numel()
        weight.ds_tensor = weight.detach().flatten().clone()
        weight.data = torch.empty(0)
    return model


def copied_(model, optimizer):
    """As at stages 1 and 2: the optimizer steps one flat copy, which replaces the weights after it."""
    weights = list(model.parameters())
    flat = nn.Parameter(torch.cat([weight.detach().flatten() for weight in weights]))
    for weight in weights:
        weight._hp_mapping = None
    optimizer.param_groups[0]["params"] = [flat]

    def step():
        flat.grad = torch.cat([weight.grad.flatten() for weight in weights])
        for weight in weights:
            weight.grad = None
        optimizer.step()
        parts = flat.detach().split([weight.numel() for weight in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.data.copy_(part.view_as(weight))

    return step
