"""When a certified model counts as accurate as plain ones, and its certificate as worth having;
free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from wellposed.statistics import (
    PairedComparison,
    holm_correction,
    mean_and_standard_error,
    paired_comparison,
)
from wellposed_studies.verdicts import ERRORS, every, inside

MARGIN = 0.01
"""What the certified model may lose against the better plain one."""
LEVEL = 0.05
"""Of the one-sided tests of that."""
RADII: Mapping[str, float] = {"ag_news": 0.1, "imdb": 0.03, "sst": 0.03, "trec": 0.1}
"""The radius at which models are compared, in units of the median token norm."""
GOALS: Mapping[str, float] = {"ag_news": 0.5, "imdb": 0.6}
"""Certified accuracy wanted there."""
TEST = (
    "on every corpus the test accuracy of the certified model is above that of the better plain"
    f" one minus {MARGIN:g} (paired t-test over seeds, one-sided at {LEVEL:g}; against the claim"
    " with Holm's correction over corpora), its certified accuracy is above "
    + " and ".join(f"{goal:g} at {RADII[corpus]:g} ({corpus})" for corpus, goal in GOALS.items())
    + f" by {ERRORS} standard errors of seeds and examples together, and no attacked certified"
    " example falls"
)


@dataclass(frozen=True)
class Evidence:
    """What is known of the certified model on one corpus; accuracies are of the same seeds in the
    same order."""

    corpus: str
    accuracy: Sequence[float]
    plain: Mapping[str, Sequence[float]]
    certified: Sequence[float]
    """At the radius of the corpus."""
    examples: int
    """Behind each of these."""
    attacked: int
    """Certified examples that were attacked, and how many of them fell."""
    fallen: int
    settled: bool
    """Whether training had levelled off, on both sides."""

    @property
    def better_plain(self) -> str:
        """Name of the plain model with the higher mean accuracy."""
        return max(self.plain, key=lambda name: fmean(self.plain[name]))

    @property
    def comparable(self) -> bool:
        """Whether every seed of both sides has an accuracy and there are two seeds or more."""
        values = [*self.accuracy, *(value for column in self.plain.values() for value in column)]
        return self.settled and len(self.accuracy) > 1 and all(map(math.isfinite, values))

    def against_plain(self) -> PairedComparison:
        """Return the paired test of accuracy + MARGIN against the better plain model."""
        return paired_comparison(
            [value + MARGIN for value in self.accuracy], self.plain[self.better_plain]
        )


def judge_accuracy(found: Sequence[Evidence]) -> bool | None:
    """Return whether the claim holds; None where a part of it cannot be said and none is against
    it."""
    parts = [*_as_accurate(found)]
    for evidence in found:
        parts.append(False if evidence.fallen else True if evidence.attacked else None)
        if evidence.corpus in GOALS:
            parts.append(_certified(evidence, GOALS[evidence.corpus]))
    missing = set(GOALS) - {evidence.corpus for evidence in found}
    return every([*parts, *(None for _ in missing)])


def _as_accurate(found: Sequence[Evidence]) -> list[bool | None]:
    tested = holm_correction(
        [evidence.against_plain() for evidence in found if evidence.comparable]
    )
    return [_decided(comparison) for comparison in tested] + [
        None for e in found if not e.comparable
    ]


def _decided(shifted: PairedComparison) -> bool | None:
    """Return whether a shifted difference is above 0; equal on all seeds, it has no spread to
    doubt."""
    difference = shifted.mean_difference or 0.0
    if difference > 0:
        return True if shifted.p_value is None or shifted.p_value / 2 < LEVEL else None
    return False if shifted.p_holm is None or shifted.p_holm / 2 < LEVEL else None


def _certified(evidence: Evidence, goal: float) -> bool | None:
    if len(evidence.certified) < 2:
        return None
    mean, error = mean_and_standard_error(evidence.certified)
    of_examples = mean * (1 - mean) / evidence.examples
    return inside(mean, math.sqrt((error or 0.0) ** 2 + of_examples), low=goal)
