"""What stands between a module's class and its call: hooks and methods set on the object."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from wellposed.hooks._torch_tools import is_of_fsdp, is_tracker
from wellposed.interrupts import undoing


def hooks_in_call(module: nn.Module) -> list[str]:
    """Return the hooks that may change what a call computes, global ones included, by name.

    Backward hooks change gradients only. Left out are hooks that `may_change` says change nothing.
    """
    places = (
        ("a forward hook", module._forward_hooks),
        ("a forward pre-hook", module._forward_pre_hooks),
        ("a global forward hook", torch_module._global_forward_hooks),
        ("a global forward pre-hook", torch_module._global_forward_pre_hooks),
    )
    return [
        f"{owner} ({getattr(hook, '__qualname__', type(hook).__qualname__)})"
        for owner, hooks in places
        for hook in hooks.values()
        if may_change(hook)
    ]


def may_change(hook: Any) -> bool:
    """Return whether a hook may change what a call computes.

    Not if it is marked ``observes_only``, follows calls for a mode of torch, or gathers weights for
    `fully_shard`.
    """
    observes_only = getattr(hook, "observes_only", False) is True
    return not (observes_only or is_of_fsdp(hook) or is_tracker(hook))


PAST_HOOKS = "a model that runs attention.forward(...) passes hooks by; write attention(...) there"
"""Why a module that computed was not seen, and what to write."""


def run_past_hooks(paths: Iterable[str], called: Collection[str]) -> list[str]:
    """Return the modules that no hook saw run, though hooks saw modules inside of them.

    Args:
        paths: Modules that are expected to run.
        called: All modules whose hooks ran.
    """
    missed = [path for path in paths if path not in called]
    return [path for path in missed if any(inner.startswith(f"{path}.") for inner in called)]


def replaced_method(module: nn.Module) -> str | None:
    """Return the first method or property of its class that is set on the object, or None.

    Methods that gather the weights of `fully_shard` and call the original are left out.
    """
    kind = type(module)
    for name, value in vars(module).items():
        if not hasattr(kind, name) or is_of_fsdp(value):
            continue
        original = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
        if callable(original) or isinstance(original, (property, staticmethod, classmethod)):
            return name
    return None


@contextmanager
def without_backward_hooks(model: nn.Module) -> Iterator[None]:
    """Run passes of our own without the user's backward hooks, which change no output."""
    names = ("_backward_hooks", "_backward_pre_hooks")
    tables = ((vars(part), name) for part in model.modules() for name in names)
    hooked: list[tuple[dict[str, Any], str, Any]] = [
        (attributes, name, attributes[name]) for attributes, name in tables if attributes[name]
    ]
    with undoing() as undo:
        for attributes, name, hooks in hooked:
            undo.later(attributes.__setitem__, name, hooks)
            attributes[name] = OrderedDict()
        yield


def is_tracked() -> bool:
    """Return whether a mode of torch that follows calls, such as `CommDebugMode`, is active.

    It fails if a module is called outside the model that it follows.
    """
    tables = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
    return any(is_tracker(hook) for table in tables for hook in table.values())
