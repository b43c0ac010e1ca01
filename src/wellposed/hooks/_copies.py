"""Hooks that copies, pickles and exports of their module leave out."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

_TABLES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""Tables of a module with hooks, or facts about them, by the number of each hook."""


def register(
    add: Callable[..., RemovableHandle], hook: Callable[..., Any], **options: Any
) -> RemovableHandle:
    """Register a hook by ``module.register_forward_hook``, or ``..._pre_hook``, for this object alone.

    The hook has an attribute ``is_of_one_object``. A copy of the module, and its pickle
    (``torch.save(model)``), have every hook but such ones.
    """
    module: Any = add.__self__  # pyright: ignore[reportFunctionMemberAccess]
    kind = type(module)
    before: Any = copyreg.dispatch_table.get(kind)
    if not isinstance(before, _Reducer):
        copyreg.dispatch_table[kind] = _Reducer(before)  # pyright: ignore[reportArgumentType]
    return add(hook, **options)


def is_recorded() -> bool:
    """Return whether a pass is exported or traced: what hooks compute must not become part of it."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


class _Reducer:
    """Reduces modules of one class as before, without the hooks of `register`."""

    def __init__(self, before: Callable[[Any], Any] | None) -> None:
        self._before = before

    def __call__(self, module: nn.Module) -> Any:
        reduced: Any = module.__reduce_ex__(4) if self._before is None else self._before(module)
        numbers = {
            number
            for table in ("_forward_pre_hooks", "_forward_hooks")
            for number, hook in vars(module)[table].items()
            if getattr(hook, "is_of_one_object", False)
        }
        if isinstance(reduced, str) or not numbers:
            return reduced

        make, arguments, *others = reduced
        # A traced module is made from its attributes, others get them as their state.
        arguments = tuple(_without(part, numbers) for part in arguments)
        return make, arguments, *[_without(part, numbers) for part in others]


def _without(part: Any, numbers: set[int]) -> Any:
    """Return the attributes of a module without the hooks of these numbers; all else unchanged."""
    if not isinstance(part, dict) or not isinstance(part.get("_forward_hooks"), Mapping):
        return part
    fewer = {name: part[name].copy() for name in _TABLES if name in part}
    for table in fewer.values():
        for number in numbers & table.keys():
            del table[number]
    return {**part, **fewer}
