"""Checks around an optimizer's step: is the weight still there, which step is it, who else steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wellposed.constrain._constrained import Constrained
from wellposed.constrain._matrix import ConstrainedMatrix
from wellposed.constrain._weight_slice import WeightSlice
from wellposed.errors import ConfigError, listed

# The code of the wrapper in which torch runs the hooks around each optimizer step.
_STEP = Optimizer.profile_hook_step(lambda _: None).__code__
# Changes by others before a warning; weights that are loaded or edited by hand change once.
LIMIT = 3


def check_still_there(model: nn.Module, names: Iterable[WeightSlice]) -> None:
    """Raise for names under which the model has another parameter; wrapped modules are allowed."""

    def is_there(part: WeightSlice) -> bool:
        module: nn.Module | None = model
        for key in part.module_path.split(".") if part.module_path else ():
            module = None if module is None else module._modules.get(key)
        return module is part.module

    live = () if all(map(is_there, names)) else set(map(id, model.modules()))
    gone = [
        part.parameter_name
        for part in names
        if part.module._parameters.get(part.name) is not part.parameter
        or (live and id(part.module) not in live)
    ]
    if gone:
        raise ConfigError(
            "constrain_: the model no longer has these constrained weights: a parametrization, pruning,"
            " quantisation, an assignment, untying, a new module or load_state_dict(assign=True)"
            " replaced them. Undo it, or build the optimizer and call constrain_ again:\n"
            f"{listed(gone)}"
        )


def check_still_stepped(
    optimizer: Optimizer, due: Sequence[Constrained], stepped: Iterable[Tensor]
) -> None:
    """Raise if the optimizer steps none of its constrained weights any more, but copies of them."""
    now = set(map(id, stepped))
    if due and not any(id(weight.parameter) in now for weight in due):
        lines = list(dict.fromkeys(weight.path for weight in due))
        raise ConfigError(
            f"constrain_: {type(optimizer).__name__} now steps other tensors than these constrained"
            " weights, as after deepspeed.initialize (ZeRO) or FSDP1, so the constraint would be lost"
            f" at every step; use DDP, or FSDP2 and constrain_ after fully_shard:\n{listed(lines)}"
        )


def is_inner(optimizer: Optimizer) -> bool:
    """Whether this step of a base class runs inside the optimizer's own: hooks run around both."""
    frame = sys._getframe()
    steps = 0
    while frame is not None:
        if frame.f_code is _STEP and frame.f_locals["args"][:1] == (optimizer,):
            steps += 1
        frame = frame.f_back
    return steps > 1


def check_dtypes(ready: Sequence[ConstrainedMatrix]) -> None:
    """Raise for weights of another dtype than before, if their float32 copy depends on it."""
    changed = [w for w in ready if w.set.keeps_master and w.stored_dtype != w.parameter.dtype]
    lines = [f"{w.path}: was {w.stored_dtype}, now {w.parameter.dtype}" for w in changed]
    if lines:
        raise ConfigError(
            "constrain_: these weights changed their dtype while they were constrained; call remove(),"
            " convert the model, build its optimizer and call constrain_ again:\n" + listed(lines)
        )


def check_gradients(ready: Sequence[Constrained]) -> None:
    """Raise for sparse gradients."""
    sparse = [w.path for w in ready if getattr(w.parameter.grad, "is_sparse", False)]
    if sparse:
        raise ConfigError(
            "constrain_: these weights have sparse gradients, whose projections are not"
            f" sparse; use nn.Embedding(sparse=False):\n{listed(sparse)}"
        )


def change_counter(say: Callable[[], None]) -> Callable[[Tensor], None]:
    """Return a hook that compares the sum of the entries, and calls ``say`` at the third change."""
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
