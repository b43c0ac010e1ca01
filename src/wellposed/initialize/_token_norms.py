"""The norms of the tokens on their way through a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import ConvergenceError
from wellposed.watch import first_tensor

Hook = Callable[[Tensor], None]


@contextmanager
def hooks(
    inputs: Sequence[tuple[nn.Module, Hook]], outputs: Sequence[tuple[nn.Module, Hook]]
) -> Iterator[None]:
    """Hand the first floating tensor that enters or leaves each module to its function.

    For torch's attention, whose projections are no modules, that is the query; wrap the hook in
    `ValueInput` to see the value.
    """
    with ExitStack() as stack:
        for module, note in inputs:
            stack.callback(module.register_forward_pre_hook(_before(note), with_kwargs=True).remove)
        for module, note in outputs:
            stack.callback(module.register_forward_hook(_after(note)).remove)
        yield


@dataclass(frozen=True)
class ValueInput:
    """A hook on the argument ``value`` of `torch.nn.MultiheadAttention`."""

    note: Hook

    def __call__(self, hidden: Tensor) -> None:
        self.note(hidden)


def _before(note: Hook) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        del module
        values = [*arguments, *keywords.values()]
        if isinstance(note, ValueInput):
            values = [keywords["value"]] if "value" in keywords else list(arguments[2:])
        tensor = first_tensor(values)
        if tensor is not None:
            note(tensor)

    return hook


def _after(note: Hook) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, arguments: Any, output: Any) -> None:
        del module, arguments
        tensor = first_tensor(output)
        if tensor is not None:
            note(tensor)

    return hook


def token_norms(hidden: Tensor, real: Tensor | None, where: str) -> Tensor:
    """Return the Euclidean norm of each real token, shape (tokens,), in float32 or better.

    Where the mask of real tokens does not fit, all count.

    Raises:
        ConvergenceError: a norm is not finite; ``where`` is named.
    """
    norms = hidden.to(torch.promote_types(hidden.dtype, torch.float32)).norm(dim=-1)
    fits = real is not None and real.shape == norms.shape
    norms = norms[real.to(norms.device)] if real is not None and fits else norms.flatten()
    if not bool(norms.isfinite().all()):
        count = int((~norms.isfinite()).sum())
        raise ConvergenceError(
            f"{where}: {count} of {norms.numel()} token norms are not finite (dtype"
            f" {hidden.dtype}); the signal overflows before this point: look at it with"
            " signal_propagation on a float32 copy, and use bf16 or float32"
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
        """Mean norm; None where no token was seen."""
        return self.total / self.tokens if self.tokens else None

    @property
    def root_mean_square(self) -> float | None:
        """Root of the mean squared norm; None where no token was seen."""
        return math.sqrt(self.squares / self.tokens) if self.tokens else None
