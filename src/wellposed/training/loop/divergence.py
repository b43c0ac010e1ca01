"""Find the layer whose activation, or gradient, stopped being finite first, by running the batch
again under hooks."""

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


NOT_REPEATED = Blame(ROOT, "running the batch again gave finite values: it does not repeat")


class Divergence(Exception):  # noqa: N818 (an event of the loop, turned into a result before a user sees it)
    """A loss or gradient is not finite; carries what the result tells."""

    def __init__(self, *, step: int, learning_rate: float, what: str, blame: Blame | None) -> None:
        blame = blame or NOT_REPEATED
        self.step, self.learning_rate, self.what, self.blame = step, learning_rate, what, blame
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

    Status: exact for the batch given, when ``compute_losses`` repeats the run (same weights, same
    random state). A layer that is fed non-finite values is not blamed; the block around it, which
    made them, is. When everything forward is finite, the backward pass is searched the same way,
    and then the norm of all gradients. Only tensors that carry gradients are looked at, since masks
    hold -inf by right.

    Args:
        model: the model, with the weights from before the failed step.
        compute_losses: runs the forward pass of ``model`` and returns the terms of the loss by
        name.

    Returns:
        The layer and the reason; None when everything is finite.

    Cost: one forward and one backward pass with a scan of every activation.
    """
    weights = [name for name, parameter in model.named_parameters() if not _finite(parameter)]
    if weights:
        reason = f"weights hold NaN or infinite values: {shortened(weights)}"
        return Blame(_owner(weights[0]), reason)
    watcher = _FiniteWatcher(model)
    try:
        model.zero_grad(set_to_none=True)
        losses = compute_losses()
        if watcher.blame is not None:
            return watcher.blame
        for name, loss in losses.items():
            if not _finite(loss):
                reason = f"every activation is finite, but this term is {float(loss.detach())}"
                return Blame(name, reason)
        sum(losses.values(), torch.zeros(())).backward()
        return watcher.gradient_blame or _weight_blame(model)
    finally:
        for handle in watcher.handles:
            handle.remove()
        model.zero_grad(set_to_none=True)


class _FiniteWatcher:
    """Hooks on every module that note the first non-finite activation and the first non-finite
    gradient."""

    def __init__(self, model: nn.Module) -> None:
        self.blame: Blame | None = None
        self.gradient_blame: Blame | None = None
        self._running = [ROOT]
        self._last_finite_gradient = "(the loss)"
        self.handles: list[Any] = []
        for path, module in model.named_modules():
            before, after = partial(self._before, path or ROOT), partial(self._after, path or ROOT)
            self.handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self.handles.append(module.register_forward_hook(after))

    def _before(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        bad = [tensor for tensor in _activations((args, kwargs)) if not _finite(tensor)]
        if self.blame is None and bad:
            reason = f"{_describe(bad[0])} computed inside it, before {name}"
            self.blame = Blame(self._running[-1], reason)
        self._running.append(name)

    def _after(self, name: str, _: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()
        outputs = _activations(output)
        bad = [tensor for tensor in outputs if not _finite(tensor)]
        if self.blame is None and bad:
            inputs = [each.detach() for each in _activations(args) if each.numel()]
            sizes = [float(each.abs().max()) for each in inputs]
            fed = f" from inputs of at most {max(sizes):.4g}" if sizes else ""
            self.blame = Blame(name, f"{_describe(bad[0])} at its output{fed}")
        for tensor in outputs:
            tensor.register_hook(partial(self._gradient, name))

    def _gradient(self, name: str, gradient: torch.Tensor) -> None:
        if self.gradient_blame is not None:
            return
        if _finite(gradient):
            self._last_finite_gradient = name
            return
        found = f"{_describe(gradient)} as the gradient of the output of {name}"
        self.gradient_blame = Blame(self._last_finite_gradient, f"its backward pass gave {found}")


def _weight_blame(model: nn.Module) -> Blame | None:
    """Blame a weight whose gradient is not finite, or the largest where the norm of all is not."""
    named = model.named_parameters()
    gradients = {name: each.grad for name, each in named if each.grad is not None}
    for name, gradient in gradients.items():
        if not _finite(gradient):
            return Blame(_owner(name), f"the gradient of {name} is not finite")
    if not gradients or _finite(torch.nn.utils.get_total_norm(gradients.values())):
        return None
    name, gradient = max(gradients.items(), key=lambda pair: float(pair[1].abs().max()))
    reason = (
        f"the gradient of {name} has an entry of size {float(gradient.abs().max()):.4g}: every"
        f" gradient is finite, but the norm of all of them is more than {gradient.dtype} can hold"
    )
    return Blame(_owner(name), reason)


def _owner(weight: str) -> str:
    return weight.rpartition(".")[0] or ROOT


def _activations(value: Any) -> list[torch.Tensor]:
    """Return the floating tensors in ``value`` that carry gradients."""
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if leaf.is_floating_point() and leaf.requires_grad]


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


def _describe(tensor: torch.Tensor) -> str:
    values = tensor.detach()
    nans, infinite = int(torch.isnan(values).sum()), int(torch.isinf(values).sum())
    return f"{nans} NaN and {infinite} infinite of {values.numel()} values ({values.dtype})"
