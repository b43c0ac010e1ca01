"""Notice that constrained weights are trained by an optimizer that knows nothing of the
constraint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from wellposed.constrain._weight import Weight
from wellposed.errors import listed
from wellposed.linalg.sharded import is_sharded

# Changes by others before it is said; weights that are loaded or edited by hand change once.
LIMIT = 3


class IdleWatch:
    """Until an optimizer takes its first step, counts the backward passes before which one of its
    weights changed.

    A hook on a gradient sees that: one on a module would change what can be compiled and certified,
    and torch's version of a tensor does not count the steps of fused optimizers. Sharded weights
    are not watched.
    """

    def __init__(self, weights: Sequence[Weight], say: Callable[[str, str], None]) -> None:
        self._hooks: dict[int, RemovableHandle] = {}
        message = _message([weight.path for weight in weights])
        for weight in weights:
            key = id(weight.optimizer)
            if key not in self._hooks and not is_sharded(weight.parameter):
                seen = _change_counter(partial(say, "idle", message))
                self._hooks[key] = weight.parameter.register_post_accumulate_grad_hook(seen)

    def stepped(self, optimizer: Optimizer) -> None:
        """Stop watching for an optimizer that takes a step."""
        hook = self._hooks.pop(id(optimizer), None)
        if hook is not None:
            hook.remove()

    def remove(self) -> None:
        """Stop watching."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()


def _change_counter(say: Callable[[], None]) -> Callable[[Tensor], None]:
    """Compare the sum of the entries with that of the last backward pass; ``say`` at the third change."""
    last: list[float] = []
    changes = 0

    def compare(parameter: Tensor) -> None:
        nonlocal changes
        wide = torch.float64 if parameter.device.type != "mps" else torch.float32
        total = float(parameter.detach().sum(dtype=wide))
        changes += bool(last) and total != last.pop()
        last.append(total)
        if changes == LIMIT:
            say()

    return compare


def _message(paths: list[str]) -> str:
    return (
        f"constrained weights changed {LIMIT} times between backward passes, but the optimizer"
        " given to constrain_ took no step: another optimizer trains them (a Trainer makes its own"
        " unless it is given one), and they leave their set. Call constrain_ with the one that"
        f" steps, Trainer(..., optimizers=(optimizer, scheduler)):\n{listed(paths)}"
    )
