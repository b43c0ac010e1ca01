"""Checks of modules: the sizes they are built from, their parts, and the tokens they read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor, nn

from wellposed.call_checks import checked_arguments
from wellposed.errors import ConfigError, ShapeError
from wellposed.options import Ge, Gt, Lt

LEAST_EPS = torch.finfo(torch.float32).tiny
"""Smallest normal number of float32; below it, a token of zeros divides zero by zero."""


Eps: TypeAlias = Annotated[float, Ge(LEAST_EPS), "or tokens that are zero divide by zero"]
"""Keeps the divisor of a token of zeros above zero, also in float32."""
Share: TypeAlias = Annotated[float, Gt(0), Lt(1)]


class CheckedModule(nn.Module):
    """A module that refuses misspelt keywords and values outside the hints of ``__init__``."""

    repr_fields: tuple[str, ...] = ()
    """Names of the attributes in its repr."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = checked_arguments(cls.__init__, str, nn.Module)

    def extra_repr(self) -> str:
        """Return the attributes named in `repr_fields`, after those of torch's own class."""
        named = (f"{name}={getattr(self, name)!r}" for name in self.repr_fields)
        return ", ".join(filter(None, (super().extra_repr(), *named)))


_ORDINARY = (nn.Parameter, Tensor)
INTEGERS = (torch.int64, torch.int32)


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether `module(x)` is just the formula of `kind` with the module's weights.

    False for any other class (such as an adapter or parametrisation), a hook, a `forward` set on
    the object (accelerate does so for offloaded weights), or a weight that is sharded or quantised.
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
    """Whether reading values neither waits for an accelerator nor breaks a compiled graph."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def writes_to(x: Tensor) -> int | None:
    """Return torch's count of writes to a tensor; None in graphs and inference mode, without one."""
    return None if torch.compiler.is_compiling() or x.is_inference() else x._version


def check_unwritten(owner: nn.Module, branch: str, x: Tensor, writes: int | None) -> None:
    """Raise `ConfigError` if ``x`` was written to since `writes_to`: a residual would add that."""
    if writes is not None and x._version != writes:
        raise ConfigError(
            f"{type(owner).__name__}: {branch} ({type(owner.get_submodule(branch)).__name__})"
            " overwrites its input, which the residual adds to its output; build it with"
            " inplace=False, or write its operations out of place"
        )


def check_tokens(
    module: nn.Module,
    x: object,
    width: int,
    *,
    name: str = "x",
    batched: bool = False,
    min_tokens: int = 0,
) -> None:
    """Raise `ShapeError` unless x is (..., width), or (batch, tokens, width) if ``batched``."""
    received: Any = f"of type {type(x).__name__}"
    if isinstance(x, Tensor):
        received = tuple(x.shape)
    fits = isinstance(received, tuple) and received[-1:] == (width,)
    if fits and (not batched or (len(received) == 3 and received[1] >= min_tokens)):
        return
    shape = "batch, tokens" + (f" >= {min_tokens}" if min_tokens else "") if batched else "..."
    raise ShapeError(
        f"{type(module).__name__}: received {name} {received}; expected a tensor ({shape}, {width})"
    )


def read_table(
    module: nn.Module, ids: Tensor, rows: int, read: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return ``read(ids)``; raise `ShapeError` if ids are not integers or (on the CPU) not rows."""
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
