"""Run a model on a batch and note the norms of the tokens on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError, ConvergenceError

Hook = Callable[[Tensor], None]


def call(model: nn.Module, batch: Any) -> Any:
    """Call the model as ``model(**batch)``, ``model(*batch)`` or ``model(batch)``."""
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return model(*batch)
    raise ConfigError(
        f"batch: received {type(batch).__name__}; expected a tensor, a mapping of keyword arguments or a sequence of "
        "positional ones"
    )


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Evaluate without gradients and without dropout, and leave every module's mode as it was."""
    modes = {module: module.training for module in model.modules()}
    fast = torch.backends.mha.get_fastpath_enabled()
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)  # the fused layer hides its parts from hooks
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def hooks(inputs: Sequence[tuple[nn.Module, Hook]], outputs: Sequence[tuple[nn.Module, Hook]]) -> Iterator[None]:
    """Hand the first floating tensor that enters or leaves each module to its function.

    For torch's attention, whose projections are no modules, ``(attention, hook)`` sees the query; wrap the hook in
    `Third` to see the value.
    """
    with ExitStack() as stack:
        for module, note in inputs:
            stack.callback(module.register_forward_pre_hook(_before(note), with_kwargs=True).remove)
        for module, note in outputs:
            stack.callback(module.register_forward_hook(_after(note)).remove)
        yield


@dataclass(frozen=True)
class Third:
    """A hook on the argument ``value`` of `torch.nn.MultiheadAttention`."""

    note: Hook

    def __call__(self, hidden: Tensor) -> None:
        self.note(hidden)


def _before(note: Hook) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        del module
        values = [*arguments, *keywords.values()]
        if isinstance(note, Third):
            values = [keywords["value"]] if "value" in keywords else list(arguments[2:])
        tensor = first_tensor(values)
        if tensor is not None:
            note(tensor)

    return hook


def _after(note: Hook) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, arguments: Any, output: Any) -> None:
        del module, arguments
        tensor = first_tensor([output])
        if tensor is not None:
            note(tensor)

    return hook


def first_tensor(values: Sequence[Any]) -> Tensor | None:
    """Return the first floating tensor with at least two dimensions, looking into tuples."""
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2:
            return value
        if isinstance(value, (tuple, list)):
            found = first_tensor(value)
            if found is not None:
                return found
    return None


def real_tokens(batch: Any, hidden: Tensor, stack: str | None) -> Tensor | None:
    """Return the bool mask (batch, tokens) of real tokens where the batch names one that fits, else None."""
    if not isinstance(batch, Mapping):
        return None
    names = ("decoder_attention_mask", "attention_mask") if stack == "decoder" else ("attention_mask",)
    for name in names:
        mask = batch.get(name)
        if isinstance(mask, Tensor) and mask.ndim == 2 and hidden.ndim == 3 and mask.shape == hidden.shape[:2]:
            return mask.bool().to(hidden.device)
    return None


def token_norms(hidden: Tensor, real: Tensor | None, where: str) -> Tensor:
    """Return the Euclidean norm of each real token, shape (tokens,), in float32 or better.

    Raises:
        ConvergenceError: a norm is not finite; ``where`` is named.
    """
    norms = hidden.to(torch.promote_types(hidden.dtype, torch.float32)).norm(dim=-1)
    norms = norms.flatten() if real is None else norms[real]
    if not bool(norms.isfinite().all()):
        count = int((~norms.isfinite()).sum())
        raise ConvergenceError(
            f"{where}: {count} of {norms.numel()} token norms are not finite (dtype {hidden.dtype}); the signal "
            "overflows before this point: look at it with signal_propagation on a float32 copy, and use bf16 or float32"
        )
    return norms


class MeanNorm:
    """Mean and root mean square of token norms, over as many calls as there are."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.total = 0.0
        self.squares = 0.0
        self.tokens = 0

    def add(self, hidden: Tensor, real: Tensor | None) -> None:
        """Add the tokens of one call."""
        norms = token_norms(hidden, real, self.where).double()
        self.total += norms.sum().item()
        self.squares += norms.square().sum().item()
        self.tokens += norms.numel()

    @property
    def mean(self) -> float | None:
        """Mean norm, None where no token came by."""
        return self.total / self.tokens if self.tokens else None

    @property
    def root_mean_square(self) -> float | None:
        """Root of the mean squared norm, None where no token came by."""
        return math.sqrt(self.squares / self.tokens) if self.tokens else None
