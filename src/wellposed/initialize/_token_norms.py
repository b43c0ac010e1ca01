"""The norms of the tokens on their way through a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wellposed.errors import ConvergenceError
from wellposed.watch import first_tensor


@dataclass
class Meter:
    """Euclidean norms of the real tokens that enter or leave modules, over as many calls as there
    are."""

    where: str
    """What an error names."""
    modules: Sequence[nn.Module]
    real: Tensor | None
    """(batch, tokens), True for real tokens; where it does not fit, all count."""
    side: Literal["input", "value", "output"] = "input"
    """``value`` is that argument of `torch.nn.MultiheadAttention`, whose projections are no
    modules."""
    norms: list[Tensor] = field(default_factory=list)

    @property
    def mean(self) -> float | None:
        """Mean norm; None where no token was seen."""
        return torch.cat(self.norms).mean().item() if self.norms else None

    @property
    def root_mean_square(self) -> float:
        """Root of the mean squared norm of at least one token."""
        return torch.cat(self.norms).square().mean().sqrt().item()

    def entered(self, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Note what enters."""
        values = [*arguments, *keywords.values()]
        if self.side == "value":
            values = [keywords["value"]] if "value" in keywords else list(arguments[2:])
        self._add(values)

    def left(self, _: nn.Module, __: Any, output: Any) -> None:
        """Note what leaves."""
        self._add(output)

    def _add(self, value: Any) -> None:
        hidden = first_tensor(value)
        if hidden is None:
            return
        norms = hidden.detach().to(torch.promote_types(hidden.dtype, torch.float32)).norm(dim=-1)
        fits = self.real is not None and self.real.shape == norms.shape
        norms = norms[self.real.to(norms.device)] if self.real is not None and fits else norms
        infinite = int((~norms.isfinite()).sum())
        if infinite:
            raise ConvergenceError(
                f"{self.where}: {infinite} of {norms.numel()} token norms are not finite (dtype"
                f" {hidden.dtype}); the signal overflows before this point: look at it with"
                " signal_propagation on a float32 copy, and use bf16 or float32"
            )
        if norms.numel():
            self.norms.append(norms.flatten().double().cpu())


@contextmanager
def reading(meters: Sequence[Meter]) -> Iterator[None]:
    """Let the meters read every call."""
    with ExitStack() as stack:
        for meter in meters:
            for module in meter.modules:
                handle = (
                    module.register_forward_hook(meter.left)
                    if meter.side == "output"
                    else module.register_forward_pre_hook(meter.entered, with_kwargs=True)
                )
                stack.callback(handle.remove)
        yield
