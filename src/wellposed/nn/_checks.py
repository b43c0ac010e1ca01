"""What modules check: the sizes they are built from, what they are made of, and the tokens they read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor, nn

from wellposed.call_checks import checked_arguments
from wellposed.errors import ShapeError
from wellposed.options import Ge, Gt, Lt

LEAST_EPS = torch.finfo(torch.float32).tiny
"""Smallest normal number of float32; below it, a token of zeros divides zero by zero."""


Eps: TypeAlias = Annotated[float, Ge(LEAST_EPS), "or tokens that are zero divide by zero"]
"""What keeps the divisor of a token of zeros off zero, in float32 as well."""
Share: TypeAlias = Annotated[float, Gt(0), Lt(1)]


class Part(nn.Module):
    """A module that refuses misspelt keywords, with the nearest, and values that the hints of its
    ``__init__`` do not allow.

    >>> from wellposed.options import Rate, Size
    >>> class Layer(Part):
    ...     def __init__(self, width: Size, *, rate: Rate = 0.0) -> None:
    ...         super().__init__()
    >>> Layer(8, rate=2.0)
    Traceback (most recent call last):
    ...
    wellposed.errors.ConfigError: Layer: rate = 2.0, expected a finite number >= 0 and < 1
    """

    shown: tuple[str, ...] = ()
    """Names of the attributes that its text shows."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = checked_arguments(cls.__init__, str, nn.Module)

    def extra_repr(self) -> str:
        """Return the attributes named in `shown`, after what a class of torch shows."""
        named = (f"{name}={getattr(self, name)!r}" for name in self.shown)
        return ", ".join(filter(None, (super().extra_repr(), *named)))


_ORDINARY = (nn.Parameter, Tensor)
INTEGERS = (torch.int64, torch.int32)


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling `module` is nothing but the formula of `kind` with the module's own weights.

    No other class (adapters and parametrisations have their own), no hook, no `forward` put on the
    object (accelerate loads offloaded weights there), no weight of a special kind (sharded,
    quantised).

    >>> layer = nn.Linear(2, 2)
    >>> is_plain(layer, nn.Linear), is_plain(nn.Sequential(layer), nn.Linear)
    (True, False)
    >>> handle = layer.register_forward_hook(print)
    >>> is_plain(layer, nn.Linear)
    False
    """
    return (
        type(module) is kind
        and "forward" not in module.__dict__
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and all(
            weight is None or type(weight) in _ORDINARY for weight in module._parameters.values()
        )
        and not torch.nn.modules.module._has_any_global_hook()
    )


def on_host(tensor: Tensor) -> bool:
    """Return whether values may be read without making an accelerator wait or breaking a compiled
    graph."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def check_tokens(
    module: nn.Module,
    x: object,
    width: int,
    *,
    name: str = "x",
    batched: bool = False,
    least: int = 0,
) -> None:
    """Raise `ShapeError` where x is no tensor (..., width), or, ``batched``, (batch, tokens, width)
    of ``least`` tokens.

    >>> check_tokens(nn.Identity(), torch.zeros(2, 3), 4)
    Traceback (most recent call last):
    ...
    wellposed.errors.ShapeError: Identity: received x (2, 3); expected a tensor (..., 4)
    """
    received: Any = f"of type {type(x).__name__}"
    if isinstance(x, Tensor):
        received = tuple(x.shape)
    fits = isinstance(received, tuple) and received[-1:] == (width,)
    if fits and (not batched or (len(received) == 3 and received[1] >= least)):
        return
    shape = "batch, tokens" + (f" >= {least}" if least else "") if batched else "..."
    raise ShapeError(
        f"{type(module).__name__}: received {name} {received}; expected a tensor ({shape}, {width})"
    )


def read_table(
    module: nn.Module, ids: Tensor, rows: int, read: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return ``read(ids)``; raise `ShapeError` where ids are no integers or (on the CPU) no rows."""
    try:
        if ids.dtype in INTEGERS:
            return read(ids)
    except IndexError:
        pass
    ends = f" from {ids.min()} to {ids.max()}" if ids.numel() else ""
    raise ShapeError(
        f"{type(module).__name__}: received ids{ends} in {ids.dtype} of shape {tuple(ids.shape)};"
        f" expected torch.int64 or torch.int32 in [0, {rows})"
    )
