"""Models trained for ever twice as many steps, until none gains any more or each overfits; free of
torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from wellposed_studies.study import FinishedRun
from wellposed_studies.verdicts import overfits, plateau

Trained = Mapping[str, Sequence[FinishedRun]]
"""The runs of each model, one a seed."""


def double_until_plateau(
    first: Trained, train: Callable[[int], Trained], most: int
) -> list[Trained]:
    """Train for 2, 4, 8, ... times the steps until no model gains by it or it overfits, and return
    every length's runs.

    Args:
        first: the shortest runs.
        train: every model for so many times the steps of ``first``, with the same settings and
        seeds.
        most: doublings at most.
    """
    lengths = [first]
    while len(lengths) <= most and not at_plateau(lengths):
        lengths.append(train(2 ** len(lengths)))
    return lengths


def at_plateau(lengths: Sequence[Trained]) -> bool:
    """Return whether every model gained less than 1 % of its mean loss on *valid* by the last
    doubling, or overfits."""
    if len(lengths) < 2:
        return False
    shorter, longer = lengths[-2:]
    return all(
        plateau(_losses(shorter[name]), _losses(longer[name])) or _overfit(longer[name])
        for name in shorter
    )


def _overfit(runs: Sequence[FinishedRun]) -> bool:
    return all(
        not run.failure and overfits([loss for _, loss in run.curve("valid")]) for run in runs
    )


def _losses(runs: Sequence[FinishedRun]) -> list[float]:
    return [run.metric("loss,valid", math.inf) for run in runs]
