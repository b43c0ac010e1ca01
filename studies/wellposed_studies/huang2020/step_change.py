"""How far one training step moves the output of a model, which T-Fixup bounds."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError
from wellposed.hooks import call_model, first_tensor, quiet_run

_LIMIT_STEP = 1e-9
"""Length of the step that approximates the limit, relative to the norm of the weights."""


def step_change(model: nn.Module, batch: Any, *, biases: bool = False) -> float:
    """Return `|f(W - lr g) - f(W)| / lr` as lr -> 0, g the gradient of `<f, u>`, `|u| = 1`.

    The direction u is random. This is `|J J^T u|`, J the Jacobian of f in W, which T-Fixup bounds.
    With T-Fixup's weights it hardly depends on depth; with plain Xavier and no LayerNorm it grows
    without bound. The model is restored bit for bit.

    Status: empirical, to about six digits, by a step of 1e-9 of the norm of the weights.
    Source: Huang et al. (2020), equation 3. Cost: one training step, and a copy of the weights.

    Args:
        model: any module, in eval mode and in float64. Its first floating output of two or more
            dimensions is f.
        batch: a tensor, a mapping of keywords or a sequence of arguments.
        biases: whether to step vectors too; the derivation is for matrices.

    Raises:
        ConfigError: no parameter is trainable, or the model returns no tensor in float64.

    >>> model = nn.Linear(2, 2, bias=False).double()
    >>> x = torch.ones(1, 2, dtype=torch.float64)
    >>> round(step_change(model, x), 6)
    2.0
    """
    stepped = [p for p in model.parameters() if p.requires_grad and (biases or p.ndim >= 2)]
    with quiet_run(model, evaluate=False), torch.enable_grad():
        before = _output(model, batch)
        direction = torch.randn_like(before)
        score = (before * direction).sum() / direction.norm()
        if not (stepped and score.requires_grad):
            raise ConfigError(
                "step_change: no gradient of the output reaches a trainable matrix (requires_grad)."
                " Unfreeze one, or step vectors too with biases=True"
            )
        gradients = torch.autograd.grad(score, stepped, allow_unused=True)

    if before.dtype != torch.float64:
        raise ConfigError(
            f"step_change: the model returned {before.dtype}; the limit needs float64: call"
            " model.double()"
        )

    size = math.hypot(*(float(weight.detach().norm()) for weight in stepped))
    slope = math.hypot(*(float(g.norm()) for g in gradients if g is not None))
    lr = _LIMIT_STEP * (size or 1.0) / (slope or 1.0) if math.isfinite(slope) else math.nan
    saved = [parameter.detach().clone() for parameter in stepped]
    versions = torch.autograd._unsafe_preserve_version_counter(tuple(stepped))
    with versions, quiet_run(model, evaluate=False):
        try:
            for parameter, gradient in zip(stepped, gradients, strict=True):
                if gradient is not None:
                    parameter.sub_(lr * gradient)
            return float((_output(model, batch) - before).norm()) / lr
        finally:
            for parameter, value in zip(stepped, saved, strict=True):
                parameter.copy_(value)


def _output(model: nn.Module, batch: Any) -> Tensor:
    output = first_tensor(call_model(model, batch))
    if output is None:
        raise ConfigError(f"step_change: {type(model).__name__} returned no floating tensor")
    return output
