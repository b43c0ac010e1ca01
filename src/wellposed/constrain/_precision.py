"""Trained 16-bit weights of a constrained optimizer: those without a float32 copy lose small steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import Tensor

from wellposed.constrain._constrained import Constrained
from wellposed.half_weights import lost_steps_warning


def half_warning(weights: Iterable[Constrained]) -> str:
    """Return a warning about trained 16-bit weights of the optimizers; empty if there are none.

    A weight that an orthogonal set covers has a float32 copy and is not counted.
    """
    copied: Counter[int] = Counter()
    optimizers = {}
    for weight in weights:
        optimizers[id(weight.optimizer)] = weight.optimizer
        copied[id(weight.parameter)] += weight.entries_in_float32

    stepped: list[Tensor] = [
        parameter
        for optimizer in optimizers.values()
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    names = sorted({type(optimizer).__name__ for optimizer in optimizers.values()})
    alone = (part for part in stepped if copied[id(part)] < part.numel())
    return lost_steps_warning("constrain_", alone, " or ".join(names))
