"""Parts that backward runs again: their buffers advance once, and their weights must be the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError, listed
from wellposed.interrupts import undoing
from wellposed.module_state import ModuleState, ModuleTables


class Rerun:
    """State of a part before one forward pass, so that backward can repeat that pass.

    Layers of statistics (batch norm) and of power iterations (spectral norm) change their buffers
    in a pass. A repeated pass must start from the same ones, and leave those of today alone. Make
    one before the pass, and call `after_forward` behind it.

    Cost: a copy of the buffers of parts that are not ours; if the pass leaves all alone, the copies
    are freed after it. No launch for parts without buffers.
    """

    def __init__(self, module: nn.Module, where: str) -> None:
        self.module = module
        self.where = where
        parts = _stateful(module)
        self._before = ModuleState(parts) if parts else None
        self._versions = _versions(module.named_parameters())
        self._changed: ModuleState | None = None
        self._buffers = _versions(module.named_buffers())

    def after_forward(self) -> None:
        """Keep the copies if the pass has changed a buffer, and forget them otherwise."""
        before = self._before
        self._changed = before if before is not None and before.is_changed() else None
        self._before = None
        now = _versions(self.module.named_buffers())
        for name in _differences(self._buffers, now):
            self._buffers.pop(name, None)

    def check(self) -> None:
        """Raise `ConfigError` if a weight, or a constant buffer, is not the one of that pass."""
        changed = _differences(self._versions, _versions(self.module.named_parameters()))
        buffers = _versions(self.module.named_buffers())
        same = {name: buffers[name] for name in self._buffers if name in buffers}
        changed += _differences(self._buffers, same)
        if changed:
            raise ConfigError(
                f"{self.where}: backward runs its blocks again, and these tensors have changed since"
                f" forward, so the gradient would be wrong:\n{listed(changed)}\ncall backward"
                " before the optimizer's step, or run forward again"
            )

    @contextmanager
    def repeated(self) -> Iterator[Callable[[], None]]:
        """Run the part from its earlier state; then restore that of today.

        Yields a function that sets the earlier state again, to be called before each further pass.
        """
        if self._changed is None:
            yield _do_nothing
            return
        today = ModuleTables(_stateful(self.module))
        with undoing() as undo:
            undo.later(today.restore_tables)
            self._changed.lend_copies()
            yield self._changed.lend_copies


@contextmanager
def unchanged(module: nn.Module) -> Iterator[Callable[[], None]]:
    """Run a module on copies of its buffers; the function that is yielded makes fresh copies."""
    parts = _stateful(module)
    if not parts:
        yield _do_nothing
        return
    today = ModuleTables(parts)
    with undoing() as undo:
        undo.later(today.restore_tables)
        today.lend_copies()
        yield today.lend_copies


def once(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call`` for a checkpoint: the first call is the pass, each further one repeats it."""
    if torch.compiler.is_compiling():
        return call
    rerun = Rerun(module, f"{type(module).__name__} with gradient checkpointing")
    calls = 0

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            result = call(*args, **kwargs)
            rerun.after_forward()
            return result
        rerun.check()
        with rerun.repeated():
            return call(*args, **kwargs)

    return run


def _do_nothing() -> None:
    """Stand for a restore if there is nothing to restore."""


def _stateful(module: nn.Module) -> list[nn.Module]:
    """Return the parts that may change their buffers; our own ones hold constants only."""
    return [
        part
        for part in module.modules()
        if part._buffers and not type(part).__module__.startswith("wellposed.")
    ]


def _versions(named: Iterator[tuple[str, Tensor]]) -> dict[str, tuple[Tensor, int]]:
    return {name: (t, 0 if t.is_inference() else t._version) for name, t in named}


def _differences(
    before: dict[str, tuple[Tensor, int]], now: dict[str, tuple[Tensor, int]]
) -> list[str]:
    """Return the names of tensors that were replaced, written to, added or removed."""
    names = dict.fromkeys((*before, *now))
    absent = (None, -1)
    changed: list[str] = []
    for name in names:
        tensor, version = before.get(name, absent)
        tensor_now, version_now = now.get(name, absent)
        if tensor is not tensor_now or version != version_now:
            changed.append(name)
    return changed
