"""Attention calls of any model, observed without editing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.hooks._attention_calls import Attends, AttentionCall
from wellposed.hooks._copies import register
from wellposed.hooks._observer import ObservingHook, Run, observer_of_thread, observing_paused
from wellposed.interrupts import all_or_nothing, run_all

Receiver = Callable[[Any, Sequence[tuple[AttentionCall, Tensor]]], None]
"""Receives a role and the calls of its module, each with its result."""


class AttentionWatcher:
    """Hooks that call ``receive`` with the attention calls of a module, whenever it returns.

    Calls are `scaled_dot_product_attention`, `multi_head_attention_forward`, and, if a module makes
    neither, a softmax over matrices. A call belongs to the innermost watched module. A module with
    several roles must make one call for each, in their order; otherwise ``receive`` gets none.
    Nested tensors and passes that raise are ignored. Results do not change.
    """

    def __init__(
        self,
        model: nn.Module,
        attention: Sequence[Attends],
        receive: Receiver,
        *,
        wanted: Callable[[Any], bool] = lambda _: True,
    ) -> None:
        self._receive = receive
        self._wanted = wanted
        self._handles: list[Any] = []
        by_module: dict[nn.Module, list[Attends]] = {}
        for role in attention:
            by_module.setdefault(model.get_submodule(role.path), []).append(role)

        with all_or_nothing() as undo:
            undo.later(self.remove)
            for module, roles in by_module.items():
                enter = ObservingHook(self._enter, roles)
                leave = ObservingHook(self._leave)
                self._handles.append(register(module.register_forward_pre_hook, enter))
                # Before fully_shard frees the weights that this module projects with.
                first = {"prepend": True, "always_call": True}
                self._handles.append(register(module.register_forward_hook, leave, **first))

    def remove(self) -> None:
        """Remove the hooks, and this thread's unfinished runs from torch's stack."""
        observer = observer_of_thread()
        runs = [partial(observer.end, run) for run in observer.runs if run.watcher is self]
        run_all(
            *[handle.remove for handle in self._handles],
            self._handles.clear,
            *runs,
            observer.settle,
        )

    def forget(self) -> None:
        """End the runs that an interrupt inside an attention module left."""
        observer_of_thread().sweep()

    def _enter(self, roles: Sequence[Attends], module: nn.Module, inputs: tuple[Any, ...]) -> None:
        # torch's fast path of evaluation nests
        if any(isinstance(item, Tensor) and item.is_nested for item in inputs):
            return
        wanted = [self._wanted(role) for role in roles]
        frame = None if torch.compiler.is_compiling() else sys._getframe(2)
        observer_of_thread().begin(Run(self, module, roles, wanted, frame))

    def _leave(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        observer = observer_of_thread()
        key = (self, module)
        run = next((r for r in reversed(observer.runs) if (r.watcher, r.module) == key), None)
        if run is None:
            return
        observer.end(run)
        if output is None and sys.exc_info()[0] is not None:
            return
        with observing_paused():
            for index, role in enumerate(run.roles):
                if run.wanted[index]:
                    self._receive(role, run.calls_of(index))
