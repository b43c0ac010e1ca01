"""Hooks, methods and classes that tools of torch put on modules: FSDP2 and trackers of modules."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

_FSDP = ("torch.distributed.fsdp.",)
_TRACKERS = (
    "torch.distributed._tools.",
    "torch.distributed.tensor.debug.",
    "torch.utils.module_tracker",
)


def is_of_fsdp(call: Any) -> bool:
    """Return whether a hook, or a method set on a module, is one of FSDP2 itself.

    They gather weights and cast inputs and outputs; which function a module computes stays the same.
    """
    return _is_written_in(call, _FSDP)


def is_tracker(call: Any) -> bool:
    """Return whether a hook is one of `CommDebugMode` or another mode of torch that follows calls.

    They change no result.
    """
    return _is_written_in(call, _TRACKERS)


def _is_written_in(call: Any, packages: tuple[str, ...]) -> bool:
    function = getattr(call, "__func__", call)
    written: str = getattr(function, "__globals__", {}).get("__name__", "")
    return written.startswith(packages)


def is_fsdp_module(module: nn.Module) -> bool:
    """Return whether `fully_shard` was applied to this module itself."""
    return isinstance(module, _fsdp_class())


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class as its author wrote it.

    `fully_shard` makes a ``Linear`` an ``FSDPLinear``.
    """
    kinds = type(module).__mro__
    return next(kind.__name__ for kind in kinds if not issubclass(kind, _fsdp_class()))


def _fsdp_class() -> Any:
    # Not imported: no module is one before somebody imported it.
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
