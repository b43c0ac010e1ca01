"""Find the first layer whose output is not finite, by running the batch again under hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from wellposed.errors import shortened

ROOT = "(the model itself)"


@dataclass(frozen=True)
class Blame:
    """The dotted name of the layer at fault and what was seen there."""

    layer: str
    reason: str


NOT_REPEATED = Blame(
    ROOT, "running the batch again, every activation was finite, so the backward pass broke"
)


class Divergence(Exception):  # noqa: N818 (an event of the loop, turned into a result before a user sees it)
    """A loss or gradient is not finite; ``failure`` is the entry of ``result.json``."""

    def __init__(self, *, step: int, learning_rate: float, what: str, blame: Blame | None) -> None:
        blame = blame or NOT_REPEATED
        numbers = {"step": step, "learning_rate": learning_rate, "what": what}
        self.failure: dict[str, Any] = {**numbers, **vars(blame)}
        super().__init__(
            f"step {step}, learning rate {learning_rate:.6g}: {what}; first at {blame.layer}:"
            f" {blame.reason}; the weights were not updated; lower the learning rate, add warm-up"
            " steps, or clip at a smaller max_grad_norm"
        )


def first_nonfinite_module(
    model: nn.Module, compute_losses: Callable[[], Mapping[str, torch.Tensor]]
) -> Blame | None:
    """Run ``compute_losses`` once more and name the first layer that turned finite input into
    non-finite output.

    Status: exact for the batch given, if ``compute_losses`` repeats the run (same weights, same
    random state). A layer that is fed non-finite values is not blamed; the block around it, which
    made them, is. Only tensors that carry gradients are looked at, since masks hold -inf by
    right.

    Args:
        model: the model, with the weights from before the failed step.
        compute_losses: runs the forward pass of ``model`` and returns the terms of the loss by
            name.

    Returns:
        The layer and the reason; None if everything is finite.

    Cost: one forward pass with a scan of every activation.
    """
    weights = [name for name, parameter in model.named_parameters() if not _finite(parameter)]
    if weights:
        reason = f"weights hold NaN or infinite values: {shortened(weights)}"
        return Blame(_owner(weights[0]), reason)
    watcher = _FiniteWatcher(model)
    try:
        losses = compute_losses()
    finally:
        for handle in watcher.handles:
            handle.remove()
    if watcher.blame is not None:
        return watcher.blame
    for name, loss in losses.items():
        if not _finite(loss):
            reason = f"every activation is finite, but this term is {float(loss.detach())}"
            return Blame(name, reason)
    return None


class _FiniteWatcher:
    """Hooks on every module that note the first activation that is not finite."""

    def __init__(self, model: nn.Module) -> None:
        self.blame: Blame | None = None
        self._running = [ROOT]
        self.handles: list[Any] = []
        for path, module in model.named_modules():
            before, after = partial(self._before, path or ROOT), partial(self._after, path or ROOT)
            self.handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self.handles.append(module.register_forward_hook(after))

    def _before(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._note(self._running[-1], (args, kwargs), f"computed inside it, before {name}")
        self._running.append(name)

    def _after(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        self._running.pop()
        self._note(name, output, "at its output")

    def _note(self, name: str, values: Any, place: str) -> None:
        for leaf in tree_leaves(values) if self.blame is None else ():
            is_activation = isinstance(leaf, torch.Tensor) and leaf.requires_grad
            if is_activation and not _finite(leaf):
                self.blame = Blame(name, f"{_describe(leaf)} {place}")
                return


def _owner(weight: str) -> str:
    return weight.rpartition(".")[0] or ROOT


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


def _describe(tensor: torch.Tensor) -> str:
    values = tensor.detach()
    nans, infinite = int(torch.isnan(values).sum()), int(torch.isinf(values).sum())
    return f"{nans} NaN and {infinite} infinite of {values.numel()} values ({values.dtype})"
