"""Actions for an optimizer's step that ends by an exception: torch then calls no hook after it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from wellposed.interrupts import run_all

Action = Callable[[], object]


class StepGuard:
    """Calls every action of a list if ``optimizer.step`` ends by an exception.

    The guard is an attribute ``step`` of this optimizer object, so a copy or a pickle has none. A
    scheduler that patches the step, made earlier or later, wraps it or is wrapped. A step that was
    compiled or bound to a name before is not guarded, and `is_running` is false in it.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.undos: list[Action] = []
        self.is_running = False
        self._replaced = vars(optimizer).get("step")
        self._method = self._guarded(optimizer.step)

    def install(self) -> None:
        """Replace the step of the optimizer."""
        self.optimizer.step = self._method

    def remove(self, undo: Action) -> None:
        """Remove an action; after the last one, put the step back that was there before."""
        if undo in self.undos:
            self.undos.remove(undo)
        # If a scheduler has wrapped the guard since, it stays, and has nothing to call.
        if not self.undos and vars(self.optimizer).get("step") is self._method:
            if self._replaced is None:
                del self.optimizer.step
            else:
                self.optimizer.step = self._replaced

    def _guarded(self, step: Callable[..., Any]) -> Any:
        @functools.wraps(step)
        def guarded(_: Optimizer, *args: Any, **named: Any) -> Any:
            has_grad = torch.is_grad_enabled()
            try:
                self.is_running = True
                return step(*args, **named)
            except BaseException:
                # A signal between torch's switch and its `try` would leave gradients off.
                restore_mode = functools.partial(torch.set_grad_enabled, has_grad)
                run_all(*self.undos, restore_mode)
                raise
            finally:
                self.is_running = False

        # Under torch.compile only what the step calls has graphs.
        function: Any = torch._disable_dynamo(guarded, recursive=False)
        function.wellposed_guard = self  # a wrapper of a scheduler copies it
        return MethodType(function, self.optimizer)


def guard_of(optimizer: Optimizer) -> StepGuard:
    """Return the guard of an optimizer's step; install one if there is none."""
    guard: StepGuard | None = getattr(vars(optimizer).get("step"), "wellposed_guard", None)
    if guard is None or guard.optimizer is not optimizer:
        guard = StepGuard(optimizer)
        guard.install()
    return guard
