"""What modules check: the sizes they are built from, what they are made of, and the tokens they read."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError, ShapeError

LEAST_EPS = torch.finfo(torch.float32).tiny
"""Smallest normal number of float32; below it, a token of zeros divides zero by zero."""


def check_sizes(where: str, **sizes: int) -> None:
    """Raise `ConfigError` where a size is no integer of at least 1.

    >>> check_sizes("Stack", embed_dim=8, num_layers=1.5)
    Traceback (most recent call last):
    ...
    wellposed.errors.ConfigError: Stack: num_layers is 1.5; expected an integer of at least 1
    """
    wrong = [
        f"{name} is {size!r}"
        for name, size in sizes.items()
        if not isinstance(size, Integral) or isinstance(size, bool) or size < 1
    ]
    if wrong:
        raise ConfigError(f"{where}: {' and '.join(wrong)}; expected an integer of at least 1")


def check_eps(where: str, eps: float) -> None:
    """Raise `ConfigError` where eps does not keep a divisor off zero: it is infinite, or 0 in
    float32.

    >>> check_eps("GramSpectrum", 1e-60)
    Traceback (most recent call last):
    ...
    wellposed.errors.ConfigError: GramSpectrum: eps is 1e-60; expected a finite number of at least
    1.17549e-38, or \
tokens that are zero divide by zero
    """
    if not LEAST_EPS <= eps < math.inf:
        raise ConfigError(
            f"{where}: eps is {eps}; expected a finite number of at least {LEAST_EPS:g}, or tokens"
            " that are zero divide by zero"
        )


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
    module: nn.Module, x: object, width: int, *, name: str = "x", batched: bool = False
) -> None:
    """Raise `ShapeError` where x is no tensor (..., width), or, ``batched``, (batch, tokens, width).

    >>> check_tokens(nn.Identity(), torch.zeros(2, 3), 4)
    Traceback (most recent call last):
    ...
    wellposed.errors.ShapeError: Identity: received x (2, 3); expected a tensor (..., 4)
    """
    if isinstance(x, Tensor) and x.dim() and x.shape[-1] == width and (x.dim() == 3 or not batched):
        return
    received = tuple(x.shape) if isinstance(x, Tensor) else f"of type {type(x).__name__}"
    shape = "batch, tokens" if batched else "..."
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
    raise ShapeError(
        f"{type(module).__name__}: received ids in {ids.dtype} of shape {tuple(ids.shape)}; expected"
        f" torch.int64 or torch.int32 in [0, {rows})"
    )
