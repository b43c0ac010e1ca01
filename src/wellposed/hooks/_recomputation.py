"""Activation checkpointing: passes without it, and hooks that tell a recomputation from a pass."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from wellposed.interrupts import undoing

_REENTRANT = checkpoint.CheckpointFunction.backward.__code__
_SELECTIVE = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)


class _PlainCall:
    """Stands for torch's reentrant checkpoint, and calls the function."""

    @staticmethod
    def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        return function(*args)


def _plain_region(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    """Stand for the region that torch's other checkpoint runs in, and change nothing."""
    yield


@contextmanager
def without_recomputation() -> Iterator[None]:
    """Call checkpointed functions as plain ones, however a model came by `torch.utils.checkpoint`.

    A recomputation would run outside the modes and hooks that read a pass.
    """
    torch_checkpoint = checkpoint.__dict__
    plain = {
        "CheckpointFunction": _PlainCall,
        "_checkpoint_without_reentrant_generator": _plain_region,
    }
    before = {name: torch_checkpoint[name] for name in plain}
    with undoing() as undo:
        undo.later(torch_checkpoint.update, before)
        torch_checkpoint.update(plain)
        yield


def is_repeated() -> bool:
    """Return whether a forward pass repeats, inside backward, one that hooks have seen.

    A reentrant checkpoint runs first without gradients; its second pass is the one that counts.
    """
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
        return False
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _REENTRANT:
            return False
        frame = frame.f_back
    return True


def unseen_by_checkpoints() -> AbstractContextManager[Any]:
    """Hide what a hook computes from selective checkpointing, which counts the calls of a pass."""
    if torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack():
        return nullcontext()
    modes = _get_current_dispatch_mode_stack()
    if not any(isinstance(mode, _SELECTIVE) for mode in modes):
        return nullcontext()
    return _disable_current_modes()
