"""Many weights of one shape as one batched product: faster on an accelerator despite its copies, slower on a CPU."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from wellposed.constrain._weight import Weight
from wellposed.linalg import Retraction, Workspace, retract_, rotate, skew_gradient_, tall, tangent_gradient_

# Entries of one stacked operand: the half dozen buffers of a step stay below about 400 MB in float32.
_MAX_ENTRIES = 2**24


def batches(weights: Iterable[Weight], *, batched: bool | None) -> list[list[Weight]]:
    """Group weights that one batched product can serve; ``None`` batches on every device but the CPU."""
    groups: dict[object, list[Weight]] = {}
    for weight in weights:
        parameter = weight.parameter
        wanted = parameter.device.type != "cpu" if batched is None else batched
        gradient = weight.gradient
        if wanted and weight.is_direct and gradient is not None and gradient.dtype == parameter.dtype:
            key = (tuple(tall(weight.value).shape), parameter.dtype, parameter.device, weight.gain, weight.square)
        else:
            key = id(weight)
        groups.setdefault(key, []).append(weight)
    chunks: list[list[Weight]] = []
    for group in groups.values():
        size = max(1, _MAX_ENTRIES // group[0].value.numel())
        chunks.extend(group[start : start + size] for start in range(0, len(group), size))
    return chunks


def project_gradients_(weights: list[Weight], work: Workspace) -> None:
    """Do `Weight.project_gradient_` for a batch."""
    gradients = [tall(weight.gradient) for weight in weights if weight.gradient is not None]
    points = _stack([weight.value for weight in weights], "points", work)
    whole = _stack(gradients, "gradients", work)
    project = skew_gradient_ if weights[0].square else tangent_gradient_
    project(points, whole, gain=weights[0].gain, workspace=work)
    torch._foreach_copy_(gradients, list(whole.unbind()))


def retract_batch_(weights: list[Weight], work: Workspace) -> Retraction:
    """Do `Weight.retract_` for a batch; nothing is written when a step is not finite."""
    first = weights[0]
    current = [tall(weight.value) for weight in weights]
    result = _stack(current, "gradients", work)
    before = [weight.before for weight in weights if weight.before is not None]
    if first.square and len(before) == len(weights):
        points = _stack(before, "points", work)
        taken = rotate(
            points,
            result.sub_(points),
            out=result,
            gain=first.gain,
            tolerance=first.inner_tolerance,
            step_is_skew=all(weight.step_is_skew for weight in weights),
            drift=_worst([weight.drift for weight in weights]),
            workspace=work,
        )
    else:
        taken = retract_(result, gain=first.gain, tolerance=first.inner_tolerance, workspace=work)
    torch._foreach_copy_(current, list(result.unbind()))
    return taken


def _worst(drifts: list[float | None]) -> float | None:
    known = [drift for drift in drifts if drift is not None]
    return max(known) if len(known) == len(drifts) else None


def _stack(tensors: list[Tensor], name: str, work: Workspace) -> Tensor:
    matrices = [tall(tensor.detach()) for tensor in tensors]
    return torch.stack(matrices, out=work(name, (len(matrices), *matrices[0].shape), matrices[0]))
