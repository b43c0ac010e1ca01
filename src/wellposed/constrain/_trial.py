"""Trial steps on a small copy of an optimizer: what it reads, and what it writes after its hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wellposed.errors import is_about_resources

# Parts of class names that answer for an optimizer of which no small copy can be made.
_READS_WEIGHT = (
    "adafactor",
    "adamp",
    "fromage",
    "hyperball",
    "lamb",
    "lars",
    "lookahead",
    "madgrad",
    "nero",
    "prodigy",
    "schedulefree",
    "sgdp",
)
# Wrappers that write weights every few steps do so every 5 to 20 by default.
_STEPS = 24
_WIDTH = 8
_RATE = 1e-3
_CHANGE = 0.02
"""Relative difference of two steps that rounding cannot explain."""
# Implementations of the same step; some run on an accelerator alone.
_PLAIN = {"capturable": False, "foreach": None, "fused": None, "differentiable": False}


@dataclass(frozen=True)
class Behaviour:
    """Result of a trial of an optimizer; None if no small copy could be made."""

    reads_weight: bool | None = None
    """Whether a step depends on the weight it starts from."""
    swaps: bool | None = None
    """Whether ``eval()`` puts another weight into the parameter."""
    has_state: bool | None = None
    """Whether the constructor makes the state of a parameter, so that a step expects it."""


_BEHAVIOURS: WeakKeyDictionary[Optimizer, Behaviour] = WeakKeyDictionary()


def behaviour_of(optimizer: Optimizer) -> Behaviour:
    """Return what trial steps show of an optimizer, tried once for each."""
    if optimizer not in _BEHAVIOURS:
        reads = _tried(lambda: _reads_weight(optimizer))
        swaps = False
        if callable(getattr(optimizer, "eval", None)):
            swaps = _tried(lambda: _swaps(optimizer))
        has_state = _tried(lambda: _has_state(optimizer))
        _BEHAVIOURS[optimizer] = Behaviour(reads, swaps, has_state)
    return _BEHAVIOURS[optimizer]


def reads_weight_size(optimizer: Optimizer) -> bool:
    """Whether the optimizer's step depends on the weight itself, by trial steps or by its name."""
    names = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    is_named = any(part in name for name in names for part in _READS_WEIGHT)
    return is_named or behaviour_of(optimizer).reads_weight is True


def starts_with_state(optimizer: Optimizer) -> bool:
    """Whether a step expects a state that the constructor makes; yes if it cannot be tried."""
    return behaviour_of(optimizer).has_state is not False


def overwrites(wrapper: Any, inner: Optimizer) -> bool | None:
    """Whether a wrapper writes weights after the step of the optimizer that it wraps.

    None if no small copy of both could be made.
    """

    def write() -> bool:
        parameter = nn.Parameter(_noise(0))
        small = _small(inner, parameter)
        outer = type(wrapper)(small, **_options(type(wrapper), _plain_values(wrapper)))
        left = [parameter.detach().clone()]

        def edit(*_: Any) -> None:
            with torch.no_grad():
                parameter.copy_(_noise(len(left)))
            left.append(parameter.detach().clone())

        small.register_step_post_hook(edit)
        for step in range(_STEPS):
            parameter.grad = _noise(-step - 1)
            outer.step()
            if not torch.equal(parameter.detach(), left[-1]):
                return True
        return False

    return _tried(write)


def _tried(trial: Callable[[], bool]) -> bool | None:
    """Run a trial that leaves no trace in the generators; None if it cannot run."""
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            return trial()
    except Exception as error:  # any error of somebody else's class: it cannot be tried
        if is_about_resources(error):
            raise
        return None


def _noise(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed % 2**31)
    return torch.randn(_WIDTH, _WIDTH, generator=generator)


def _gradients(start: Tensor) -> list[Tensor]:
    """Return gradients, half of them orthogonal to the weight by rows, as AdamP looks for."""
    gradients: list[Tensor] = []
    for step in range(_STEPS):
        gradient = _noise(-step - 1)
        if step % 2:
            share = (gradient * start).sum(1, keepdim=True) / start.square().sum(1, keepdim=True)
            gradient = gradient - share * start
        gradients.append(gradient)
    return gradients


def _small(optimizer: Optimizer, parameter: nn.Parameter) -> Optimizer:
    """Make an optimizer of the same class and options, without decay, for one parameter."""
    kind = type(optimizer)
    values = {**_plain_values(optimizer), **optimizer.defaults}
    values |= {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    values |= {"lr": _RATE, "weight_decay": 0.0, **_PLAIN}
    return kind([parameter], **_options(kind, values))


def _plain_values(owner: Any) -> dict[str, Any]:
    """Return attributes that a trial may share: numbers, flags and words."""
    kinds = (bool, int, float, str, tuple)
    return {name: value for name, value in vars(owner).items() if isinstance(value, kinds)}


def _options(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """Return those values that the constructor takes beside its first argument."""
    parameters = list(inspect.signature(kind).parameters.values())[1:]
    return {
        part.name: values[part.name]
        for part in parameters
        if part.name in values and part.kind is not inspect.Parameter.VAR_KEYWORD
    }


def _start(optimizer: Optimizer, parameter: nn.Parameter) -> Optimizer:
    small = _small(optimizer, parameter)
    if callable(train := getattr(small, "train", None)):
        train()
    torch.manual_seed(0)  # of this trial alone
    return small


def _reads_weight(optimizer: Optimizer) -> bool:
    """Compare steps from the weight with steps from zero, where the constraint puts it."""
    start = _noise(0)
    points: list[Tensor] = []
    moves: list[Tensor] = []
    parameter = nn.Parameter(start.clone())
    small = _start(optimizer, parameter)
    for gradient in _gradients(start):
        points.append(parameter.detach().clone())
        parameter.grad = gradient.clone()
        small.step()
        moves.append(parameter.detach() - points[-1])

    parameter = nn.Parameter(start.clone())
    small = _start(optimizer, parameter)
    for gradient, point, move in zip(_gradients(start), points, moves, strict=True):
        with torch.no_grad():
            parameter.zero_()
        parameter.grad = gradient.clone()
        small.step()
        change = parameter.detach() - move
        # Decay by hand shrinks the weight alone, and is left out as any decay is.
        change = change - (change * point).sum() / point.square().sum() * point
        if not change.norm() <= _CHANGE * move.norm() + 1e-6:
            return True
        with torch.no_grad():
            parameter.copy_(point + move)
    return False


def _swaps(optimizer: Optimizer) -> bool:
    """Edit the weight after each step, then look whether ``eval()`` changes it."""
    parameter = nn.Parameter(_noise(0))
    small: Any = _start(optimizer, parameter)
    for step in range(3):
        parameter.grad = _noise(-step - 1)
        small.step()
        with torch.no_grad():
            parameter.mul_(0.5)
    edited = parameter.detach().clone()
    small.eval()
    return not torch.equal(parameter.detach(), edited)


def _has_state(optimizer: Optimizer) -> bool:
    parameter = nn.Parameter(_noise(0))
    return bool(_small(optimizer, parameter).state.get(parameter))
