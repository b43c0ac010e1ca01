"""The observer of a thread: a function mode that reads attention calls while watched modules run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

from wellposed.hooks._attention_calls import (
    Attends,
    AttentionCall,
    MultiheadCall,
    ScaledDotProductCall,
    SoftmaxCall,
)
from wellposed.hooks._copies import is_recorded
from wellposed.hooks._recomputation import is_repeated, unseen_by_checkpoints


@dataclass(eq=False)
class Run:
    """A running module, its frame, and its calls: one reading for each role, and the result."""

    watcher: object
    module: nn.Module
    roles: Sequence[Attends]
    wanted: Sequence[bool]
    frame: FrameType | None
    calls: list[tuple[list[AttentionCall | None], Tensor]] = field(default_factory=list)

    def calls_of(self, index: int) -> list[tuple[AttentionCall, Tensor]]:
        """Return the calls of one role."""
        without_softmax = [
            call for call in self.calls if not isinstance(call[0][index], SoftmaxCall)
        ]
        if len(self.roles) > 1:
            complete = (
                calls for calls in (without_softmax, self.calls) if len(calls) == len(self.roles)
            )
            chosen = next(complete, [])[index : index + 1]
        else:
            chosen = without_softmax or self.calls
        pairs = ((calls[index], output) for calls, output in chosen)
        return [(call, output) for call, output in pairs if call is not None]


class Observer(TorchFunctionMode):
    """Records the attention calls of one thread; on torch's stack once for each running module."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[Run] = []
        self.is_paused = False
        self._attends = False

    def begin(self, run: Run) -> None:
        """Add a run and push the observer on torch's stack."""
        self.sweep()
        self.runs.append(run)
        if any(run.wanted):
            _push_mode(self)

    def end(self, run: Run) -> None:
        """Drop a run and take the observer off torch's stack."""
        if run in self.runs:
            self.runs.remove(run)
        self.settle()

    def settle(self) -> None:
        """Take the observer off torch's stack until it is there once for each run that needs it.

        An interrupt may have come between the two lists.
        """
        stack = _get_current_function_mode_stack()
        needed = len([run for run in self.runs if any(run.wanted)])
        for _ in range(len([mode for mode in stack if mode is self]) - needed):
            self._pop()

    def _pop(self) -> None:
        above: list[TorchFunctionMode] = []
        try:
            while (top := _pop_mode()) is not self:
                above.append(top)
        finally:
            for mode in reversed(above):
                _push_mode(mode)

    def sweep(self) -> None:
        """End the runs whose module was interrupted, so that no hook ran after it."""
        for run in self.runs and set(self.runs).difference(self.alive()):
            self.end(run)

    def alive(self) -> list[Run]:
        """Return the runs whose frame is on Python's stack, the innermost last."""
        if torch.compiler.is_compiling():
            return self.runs
        frames = set[FrameType]()
        frame = sys._getframe(1)
        while frame is not None:
            frames.add(frame)
            frame = frame.f_back
        return [run for run in self.runs if run.frame is None or run.frame in frames]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if func not in _READERS or self._attends or self.is_paused:
            return func(*args, **kwargs)

        self._attends = True  # the stack has it once more, for an outer module
        try:
            output = func(*args, **kwargs)
        finally:
            self._attends = False

        for run in {run.watcher: run for run in self.alive()}.values():
            with unseen_by_checkpoints():
                read = _READERS[func].read
                calls = [read(run.module, role, *args, **kwargs) for role in run.roles]
            if any(run.wanted) and any(call is not None for call in calls):
                run.calls.append((calls, output[0] if isinstance(output, tuple) else output))

        return output


_READERS: dict[Any, Any] = {
    F.scaled_dot_product_attention: ScaledDotProductCall,
    F.multi_head_attention_forward: MultiheadCall,
    **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax), SoftmaxCall),
}
_THREAD = threading.local()


def observer_of_thread() -> Observer:
    """Return the observer of this thread; torch's stack belongs to a thread, too."""
    if not hasattr(_THREAD, "observer"):
        _THREAD.observer = Observer()
    return _THREAD.observer


@contextmanager
def observing_paused() -> Iterator[None]:
    """Silence every `ObservingHook` inside the context."""
    observer = observer_of_thread()
    before = observer.is_paused
    observer.is_paused = True
    try:
        yield
    finally:
        observer.is_paused = before


class ObservingHook:
    """A hook that only observes, each pass once; copies, pickles and exports have none of it."""

    observes_only = True
    """Tells certificates that the hook changes nothing, so they need not refuse the module."""
    is_of_one_object = True
    """Tells `register` to leave it out of copies."""

    def __init__(self, call: Callable[..., None], *bound: Any) -> None:
        self._call = call
        self._bound = bound

    def __call__(self, *args: Any) -> None:
        if is_recorded() or observer_of_thread().is_paused or is_repeated():
            return
        with unseen_by_checkpoints():
            self._call(*self._bound, *args)

    def __reduce__(self) -> tuple[Any, ...]:  # for modules that copy themselves
        return ObservingHook, (_nothing,)


def _nothing(*_: Any) -> None:
    """Do nothing, in place of a copied hook."""
