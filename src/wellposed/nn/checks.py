"""What modules check: the sizes they are built from, what they are made of, and the tokens they read."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from numbers import Number
from typing import Annotated, Any, TypeAlias, get_type_hints

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError, ShapeError, listed, unknown_name
from wellposed.options import Ge, Gt, Lt, misfits
from wellposed.options import is_plain as is_hint

LEAST_EPS = torch.finfo(torch.float32).tiny
"""Smallest normal number of float32; below it, a token of zeros divides zero by zero."""


Eps: TypeAlias = Annotated[float, Ge(LEAST_EPS), "or tokens that are zero divide by zero"]
"""What keeps the divisor of a token of zeros off zero, in float32 as well."""
Share: TypeAlias = Annotated[float, Gt(0), Lt(1)]


class Part(nn.Module):
    """A module that refuses misspelt keywords, with the nearest, and values that the hints of its
    ``__init__`` do not allow; a text in ``Annotated`` is advice, said with the refusal.

    >>> from wellposed.options import Rate, Size
    >>> class Layer(Part):
    ...     def __init__(self, width: Size, *, rate: Rate = 0.0) -> None:
    ...         super().__init__()
    >>> Layer(8, rate=2.0)
    Traceback (most recent call last):
    ...
    wellposed.errors.ConfigError: Layer: rate: received 2.0; expected a finite number >= 0 and < 1
    """

    shown: tuple[str, ...] = ()
    """Names of the attributes that its text shows."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = checked_arguments(cls.__init__)

    def extra_repr(self) -> str:
        """Return the attributes named in `shown`, after what a class of torch shows."""
        named = (f"{name}={getattr(self, name)!r}" for name in self.shown)
        return ", ".join(filter(None, (super().extra_repr(), *named)))


def checked_arguments(init: Callable[..., None], **sharper: Any) -> Callable[..., None]:
    """Return a constructor whose arguments are checked as `Part` says, by ``sharper`` hints too."""
    signature = inspect.signature(init)
    names = [name for name in signature.parameters if name != "self"]
    takes_all = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())

    @functools.cache
    def hints() -> dict[str, Any]:
        found = {**get_type_hints(init, include_extras=True), **sharper}
        read = (name for name, hint in found.items() if hint in (str, nn.Module) or is_hint(hint))
        return {name: found[name] for name in read}

    @functools.wraps(init)
    def checked(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        where = type(self).__name__
        for name in kwargs:
            if name not in names and not takes_all:
                raise unknown_name(f"keyword of {where}", name, names)
        try:
            given = signature.bind(self, *args, **kwargs).arguments
        except TypeError as error:
            raise ConfigError(f"{where}: {error}; it takes {', '.join(names)}") from error
        # A number of numpy is one.
        values = {
            name: value.item() if isinstance(value, Number) and hasattr(value, "item") else value  # pyright: ignore[reportAttributeAccessIssue]
            for name, value in given.items()
            if name in hints()
        }
        problems = []
        for name, value, expected in misfits(values, hints()):
            # What ``Annotated`` says in words beside its limits.
            said = getattr(hints()[name], "__metadata__", ())
            advice = (part for part in said if isinstance(part, str))
            received = f"{name}: received {value!r}; expected {expected}"
            problems.append("; ".join((received, *advice)))
        if problems:
            raise ConfigError(
                f"{where}: {problems[0]}" if len(problems) == 1 else f"{where}:\n{listed(problems)}"
            )
        init(self, *args, **kwargs)

    return checked


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
