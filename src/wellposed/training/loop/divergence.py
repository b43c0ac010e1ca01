"""Find the layer whose activation, or gradient, stopped being finite first, by running the batch
again under hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from wellposed.errors import MAX_LISTED

ROOT = "(the model itself)"


@dataclass(frozen=True)
class Blame:
    """The dotted name of the layer at fault and what was seen there."""

    layer: str
    reason: str


NOT_REPEATED = Blame(
    ROOT, "running the batch again gave finite values, so the failure does not repeat"
)


class Divergence(Exception):  # noqa: N818 (an event of the loop, turned into a result before a user sees it)
    """A loss or gradient is not finite; carries what the result tells."""

    def __init__(self, *, step: int, learning_rate: float, what: str, blame: Blame) -> None:
        self.step, self.learning_rate, self.what, self.blame = step, learning_rate, what, blame
        super().__init__(
            f"step {step}, learning rate {learning_rate:.6g}: {what}; first at {blame.layer}:"
            f" {blame.reason}; the weights were not updated; lower the learning rate, add warm-up"
            " steps, or clip at a smaller max_grad_norm"
        )


def find_blame(
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
        more = f" and {len(weights) - MAX_LISTED} more" if len(weights) > MAX_LISTED else ""
        owner = weights[0].rpartition(".")[0] or ROOT
        return Blame(
            owner, f"weights hold NaN or infinite values: {', '.join(weights[:MAX_LISTED])}{more}"
        )
    watcher = _FiniteWatcher(model)
    try:
        model.zero_grad(set_to_none=True)
        losses = compute_losses()
        if watcher.blame is not None:
            return watcher.blame
        for name, loss in losses.items():
            if not _finite(loss):
                return Blame(
                    name, f"every activation is finite, but this term is {float(loss.detach())}"
                )
        sum(losses.values(), torch.zeros((), device=next(model.parameters()).device)).backward()
        return watcher.backward_blame(model)
    finally:
        watcher.remove()
        model.zero_grad(set_to_none=True)


class _FiniteWatcher:
    """Hooks on every module that note the first non-finite activation and the first non-finite
    gradient."""

    def __init__(self, model: nn.Module) -> None:
        self.blame: Blame | None = None
        self._running: list[str] = []
        self._last_finite_gradient = "(the loss)"
        self._gradient_blame: Blame | None = None
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            self._handles.append(
                module.register_forward_pre_hook(self._before(name or ROOT), with_kwargs=True)
            )
            self._handles.append(module.register_forward_hook(self._after(name or ROOT)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def backward_blame(self, model: nn.Module) -> Blame | None:
        if self._gradient_blame is not None:
            return self._gradient_blame
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and not _finite(parameter.grad):
                return Blame(
                    name.rpartition(".")[0] or ROOT, f"the gradient of {name} is not finite"
                )
        return _overflow_of_norm(model)

    def _before(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            inputs = [tensor for tensor in _activations((args, kwargs)) if not _finite(tensor)]
            if self.blame is None and inputs:
                maker = self._running[-1] if self._running else ROOT
                self.blame = Blame(
                    maker, f"{_describe(inputs[0])} computed inside it, before {name}"
                )
            self._running.append(name)

        return hook

    def _after(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            self._running.pop()
            outputs = list(_activations(output))
            bad = [tensor for tensor in outputs if not _finite(tensor)]
            if self.blame is None and bad:
                sizes = [
                    float(tensor.detach().abs().max())
                    for tensor in _activations(args)
                    if tensor.numel()
                ]
                fed = f" from an input of at most {max(sizes):.4g}" if sizes else ""
                self.blame = Blame(name, f"{_describe(bad[0])} at its output{fed}")
            for tensor in outputs:
                if tensor.requires_grad:
                    tensor.register_hook(self._gradient(name))

        return hook

    def _gradient(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            if self._gradient_blame is not None:
                return
            if _finite(gradient):
                self._last_finite_gradient = name
            else:
                reason = (
                    f"its backward pass gave {_describe(gradient)} as the gradient of the output of"
                    f" {name}"
                )
                self._gradient_blame = Blame(self._last_finite_gradient, reason)

        return hook


def _overflow_of_norm(model: nn.Module) -> Blame | None:
    """Blame the largest of finite gradients where the norm of all of them is infinite."""
    gradients = {
        name: each.grad for name, each in model.named_parameters() if each.grad is not None
    }
    if not gradients or _finite(torch.nn.utils.get_total_norm(gradients.values())):
        return None
    name, gradient = max(gradients.items(), key=lambda pair: float(pair[1].abs().max()))
    reason = (
        f"the gradient of {name} has an entry of size {float(gradient.abs().max()):.4g}: every"
        " gradient is finite, but the norm of all of them is more than"
        f" {str(gradient.dtype).removeprefix('torch.')} can hold"
    )
    return Blame(name.rpartition(".")[0] or ROOT, reason)


def _activations(value: Any) -> Iterator[torch.Tensor]:
    """Yield the floating tensors in ``value`` that carry gradients."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.requires_grad:
            yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _activations(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _activations(entry)


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


def _describe(tensor: torch.Tensor) -> str:
    values = tensor.detach()
    nans, infinite = int(torch.isnan(values).sum()), int(torch.isinf(values).sum())
    return (
        f"{nans} NaN and {infinite} infinite of {values.numel()} values"
        f" ({str(values.dtype).removeprefix('torch.')})"
    )
