"""Find the first layer whose output is not finite, by running the batch again with hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

ROOT = "(the model itself)"
NOT_REPEATED = (
    ROOT,
    "every activation was finite when the batch ran again, so the backward pass failed",
)
Blame = tuple[str, str]
"""Dotted name of the layer at fault, and the reason."""


class Divergence(Exception):  # noqa: N818 (an event of the loop, turned into a result before a user sees it)
    """A loss or gradient is not finite; ``failure`` is the entry of ``result.json``."""

    def __init__(self, *, step: int, learning_rate: float, what: str, blame: Blame | None) -> None:
        layer, reason = blame or NOT_REPEATED
        numbers = {"step": step, "learning_rate": learning_rate, "what": what}
        self.failure: dict[str, Any] = {**numbers, "layer": layer, "reason": reason}
        super().__init__(
            f"step {step}, learning rate {learning_rate:.6g}: {what}; first at {layer}: {reason};"
            " the weights were not updated; lower the learning rate, add warm-up steps, or clip at a"
            " smaller max_grad_norm"
        )


def first_nonfinite_module(
    model: nn.Module, compute_losses: Callable[[], Mapping[str, torch.Tensor]]
) -> Blame | None:
    """Run ``compute_losses`` again and return the first layer that turned finite input into
    non-finite output, or the non-finite term of the loss. None if everything is finite.

    Status: exact, if ``compute_losses`` repeats the run (same weights, same random state) with
    ``model`` as before the failed step. It returns the terms of the loss by name. Only tensors with
    gradients are checked, since masks contain -inf.

    Cost: one forward pass with a scan of every activation.
    """
    blamed: list[str] = []

    def look(path: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not blamed and _are_finite((args, kwargs)) and not _are_finite(output):
            blamed.append(path)

    handles = [
        module.register_forward_hook(partial(look, path or ROOT), with_kwargs=True)
        for path, module in model.named_modules()
    ]
    try:
        losses = compute_losses()
    finally:
        for handle in handles:
            handle.remove()
    if blamed:
        return blamed[0], "its output has NaN or infinity"
    for name, loss in losses.items():
        if not torch.isfinite(loss):
            return name, f"every activation is finite, but this term is {float(loss.detach())}"
    return None


def _are_finite(values: Any) -> bool:
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return all(torch.isfinite(leaf).all() for leaf in leaves if leaf.requires_grad)
