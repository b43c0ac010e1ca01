"""The optimizers whose steps are constrained: unwrapped, or refused."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from wellposed.constrain._trial import behaviour_of, overwrites
from wellposed.errors import ConfigError

logger = logging.getLogger(__name__)

_NO_STEPS = frozenset({"LBFGS", "SparseAdam"})


def unwrapped_optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers themselves, or raise for one that cannot be constrained."""
    entries = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    return [_unwrapped(entry) for entry in entries]


def _unwrapped(entry: Any) -> Optimizer:
    """Return the optimizer whose step is constrained, or refuse it and its wrappers."""
    wrappers: list[Any] = []
    while isinstance(getattr(entry, "optimizer", None), Optimizer):
        wrappers.append(entry)
        entry = entry.optimizer

    name = type(entry).__name__
    if not isinstance(entry, Optimizer) or not hasattr(entry, "_optimizer_step_pre_hooks"):
        raise ConfigError(
            f"constrain_: expected a torch.optim.Optimizer, with step hooks, received {name}"
        )
    if name in _NO_STEPS:
        problem = f"{name} does not take one step from one gradient"
        raise ConfigError(f"constrain_: {problem}; use AdamW, SGD, Adafactor or Muon")
    if behaviour_of(entry).swaps:
        raise ConfigError(
            f"constrain_: {name}.eval() puts another copy of the weights into the model, which would"
            " not be in the set; use AdamW, SGD, Adafactor or Muon"
        )

    for wrapper in wrappers:
        kind = type(wrapper).__name__
        writes = overwrites(wrapper, entry)
        if writes:
            raise ConfigError(
                f"constrain_: {kind} writes other weights after the step of {name}, which would not"
                f" be in the set; train with {name} itself"
            )
        if writes is None:
            logger.warning(
                "constrain_: %s could not be tried out; if it changes weights after the step of %s,"
                " they leave the set: compare handle.error() after its step",
                kind,
                name,
            )

    return entry
