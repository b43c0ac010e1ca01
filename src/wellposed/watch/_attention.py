"""See the calls by which attention modules attend, in any model, without editing it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from wellposed.watch._calls import (
    Attends,
    AttentionCall,
    MultiheadCall,
    ScaledDotProductCall,
    SoftmaxCall,
)

_SOFTMAX = frozenset({F.softmax, torch.softmax, torch.Tensor.softmax, torch.special.softmax})

Found = Callable[[Any, Sequence[tuple[AttentionCall, Tensor]]], None]
"""Receives a role and, for each call its module made, the call and what it returned."""


class AttentionWatcher:
    """Hooks that tell ``found``, whenever one of the attention modules returns, by which calls it
    attended.

    Recognised are `scaled_dot_product_attention`, `multi_head_attention_forward` and a softmax over
    matrices, which counts only where a module made none of the other two. A `TorchFunctionMode` is
    active only while a module runs, and the results of the model do not change. Inside ``found``
    the mode is off. Nested tensors are not looked at.
    """

    def __init__(
        self,
        model: nn.Module,
        attention: Sequence[Attends],
        found: Found,
        *,
        wanted: Callable[[Any], bool] = lambda _: True,
    ) -> None:
        self._found = found
        self._wanted = wanted
        self._running: list[_CallsOfModule] = []
        self._handles: list[Any] = []
        for role in attention:
            module = model.get_submodule(role.path)
            self._handles += [
                module.register_forward_pre_hook(ObservingHook(self._enter, role)),
                module.register_forward_hook(ObservingHook(self._leave, role), always_call=True),
            ]

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forget(self) -> None:
        """Make modes inert that an interrupt inside attention left behind."""
        for mode in self._running:
            mode.active = False
        self._running.clear()

    def _enter(self, role: Attends, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        nested = any(
            isinstance(item, Tensor) and item.is_nested for item in inputs
        )  # torch's evaluation fast path
        if not nested and self._wanted(role):
            mode = _CallsOfModule(role, module)
            self._running.append(mode)
            mode.__enter__()

    def _leave(self, role: Attends, *_: Any) -> None:
        if self._running and self._running[-1].role is role:
            mode = self._running.pop()
            mode.__exit__(None, None, None)
            attention = [pair for pair in mode.calls if not isinstance(pair[0], SoftmaxCall)]
            self._found(role, attention or mode.calls)


class _CallsOfModule(TorchFunctionMode):
    """Notes the attention calls of one module while it runs."""

    def __init__(self, role: Attends, module: nn.Module) -> None:
        super().__init__()
        self.role = role
        self.module = module
        self.calls: list[tuple[AttentionCall, Tensor]] = []
        self.active = True

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self.active:
            call = self._read(func, args, kwargs)
            if call is not None:
                self.calls.append((call, output[0] if isinstance(output, tuple) else output))
        return output

    def _read(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AttentionCall | None:
        if func is F.scaled_dot_product_attention:
            return ScaledDotProductCall.read(self.role, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            return MultiheadCall.read(self.module, *args, **kwargs)
        return SoftmaxCall.read(self.role, *args, **kwargs) if func in _SOFTMAX else None


_PAUSED: ContextVar[bool] = ContextVar("observing paused", default=False)


@contextmanager
def observing_paused() -> Iterator[None]:
    """Run a model without telling those that observe it."""
    token = _PAUSED.set(True)
    try:
        yield
    finally:
        _PAUSED.reset(token)


class ObservingHook:
    """A hook that a copied or pickled model does not take along."""

    observes_only = True
    """It returns nothing and changes nothing, so that a certificate need not refuse the module."""

    def __init__(self, call: Callable[..., None], *bound: Any) -> None:
        self._call = call
        self._bound = bound

    def __call__(self, *args: Any) -> None:
        if not _PAUSED.get():
            self._call(*self._bound, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> ObservingHook:
        return ObservingHook(_nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return ObservingHook, (_nothing,)


def _nothing(*_: Any) -> None:
    """Do nothing: what a copy's hook calls."""
