"""How a verdict follows from numbers with errors: it holds, it does not, or it cannot be said; free
of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from wellposed_lab.statistics import (
    SIGNIFICANCE,
    PairedComparison,
    detectable_difference,
    largest_gain,
    mean_and_standard_error,
)
from wellposed_studies.recipe import Request, Verdict

CHANCE = 0.8
"""Chance with which a difference is to be seen."""

ERRORS = 2
"""Standard errors on either side of a mean that a verdict allows for."""
UNCERTAINTY = f"{ERRORS} standard errors over seeds"
AGREED = "every seed must agree"
LEARNED = 3
"""Standard errors by which a model has to be better than a constant predictor to be judged."""
LEVEL = 0.01
_LEAST_EVALUATIONS = 8
_BEFORE_THE_END = 0.75
GATE = (
    f"nothing is judged before every model is {LEARNED} standard errors better than a constant"
    " predictor and has levelled off, or stopped where the paper's did: the last quarter of its"
    " training, counted by the learning rate summed over its steps, improved the loss on valid by"
    f" less than {LEVEL:.0%}, or began with less than {LEVEL:.0%} of valid answered wrongly and"
    f" stayed there, in at least {_LEAST_EVALUATIONS} evaluations"
)
PLATEAU = (
    "for each, twice the steps, the schedule stretched with them, improve the mean loss on valid"
    f" by less than {LEVEL:.0%}, or it overfits in every seed: its last loss on valid is"
    f" {LEVEL:.0%} above its least or more"
)


def within(values: Sequence[float], low: float = -math.inf, high: float = math.inf) -> bool | None:
    """Return whether the mean is inside [low, high]; None where its errors reach across an end, or
    has none.

    >>> within([1.0, 1.1, 0.9], 0.5, 1.5), within([1.0, 1.1, 0.9], 2.0), within([1.0, 3.0], 2.0), within([1.0], 0.5)
    (True, False, None, None)
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    mean, error = mean_and_standard_error(values)
    return inside(mean, error or 0.0, low, high)


def inside(
    mean: float, error: float, low: float = -math.inf, high: float = math.inf
) -> bool | None:
    """Return what `within` does, of a mean and its standard error.

    >>> inside(1.0, 0.1, low=0), inside(1.0, 0.6, low=0), inside(1.0, float("nan"), low=0)
    (True, None, None)
    """
    if not math.isfinite(mean + error):
        return None
    reach = ERRORS * error
    if low <= mean - reach and mean + reach <= high:
        return True
    return False if mean + reach < low or mean - reach > high else None


def every(parts: Iterable[Verdict]) -> Verdict:
    """Return whether every part of a claim holds: one that does not is enough against it.

    >>> every([True, True]), every([True, None]), every([None, False]), every([None, "smaller"])
    (True, None, False, 'smaller')
    """
    return _first((False, "smaller", None, True), parts)


def some(parts: Iterable[Verdict]) -> Verdict:
    """Return whether some part of a claim holds; None if none does and one is undecided.

    >>> some([False, True]), some([None, False]), some([False]), some([False, "smaller"])
    (True, None, False, 'smaller')
    """
    return _first((True, None, "smaller", False), parts)


def _first(order: Sequence[Verdict], parts: Iterable[Verdict]) -> Verdict:
    """Return the first of the verdicts that some part has, of no part the last of them."""
    found = set(parts)
    return next((of for of in order if of in found), order[-1])


def gain(test: PairedComparison, least: float, *, parts: int = 1, rises: bool = True) -> Verdict:
    """Return whether a gain is there: True or False if the paired test says better or worse, after
    Holm's correction; "smaller" if a gain of ``least`` or more would have been seen.

    Two one-sided tests of equivalence (TOST) ask the same of both sides; of a claimed gain the upper
    one is the answer. It is made at 5 %, shared over ``parts`` of a claim one of which is enough
    against it. A gain that is significant and below ``least`` is "smaller", too.

    Args:
        test: the comparison, after `holm_correction` if there are several.
        least: the smallest gain that the paper prints, in the unit of the metric, above 0.
        parts: of the claim.
        rises: False if the paper says that the metric gets worse by ``least``.

    >>> from wellposed_lab.statistics import paired_comparison
    >>> test = paired_comparison([1.0, 2.0, 3.1], [1.0, 2.0, 3.0])
    >>> gain(test, 0.5), gain(test, 0.05), gain(paired_comparison([3, 4, 5.1], [1, 2, 3]), 0.5)
    ('smaller', None, True)
    """
    if not rises:
        test = replace(test, higher_is_better=not test.higher_is_better)
    most = largest_gain(test, SIGNIFICANCE / parts)
    if most is None:
        return None
    if test.significant and ((test.mean_difference or 0.0) > 0) is not test.higher_is_better:
        return False
    if most < least:
        return "smaller"
    return True if test.significant else None


def decided(*, holds: bool, against: bool) -> bool | None:
    """Return the side of a claim that is shown, None where neither is; what speaks against it wins."""
    return False if against else True if holds else None


def agreed(of_seeds: Sequence[Verdict]) -> Verdict:
    """Return what every seed, or every reading of a claim, says; None where they differ.

    >>> agreed([True, True]), agreed([False, False]), agreed([True, False])
    (True, False, None)
    """
    found, *others = set(of_seeds)
    return None if others else found


def by_training(
    judge: Callable[..., Verdict],
    effect: Callable[..., Sequence[float]],
    trained: Sequence[Any],
    untrained: Sequence[Any],
) -> Verdict:
    """Return what trained models say; where untrained ones earn a claim too, it stands only if
    training made the effect larger, and cannot be said otherwise.

    Args:
        judge: of the numbers of each side.
        effect: of the same, the size of what is claimed, seed by seed.
        trained: the numbers of each side after training.
        untrained: the same before.

    >>> judge, effect = lambda x: within(x, low=1), lambda x: x
    >>> [by_training(judge, effect, [[after, after]], [[2, 2]]) for after in (3, 2, 0)]
    [True, None, False]
    """
    holds = judge(*trained)
    if holds and judge(*untrained):
        pairs = zip(effect(*trained), effect(*untrained), strict=True)
        return True if within([a - b for a, b in pairs], high=0) is False else None
    return holds


def levelled_off(
    losses: Sequence[float], spent: Sequence[float], errors: Sequence[float] = ()
) -> bool:
    """Return whether the last quarter of training improved the best loss by less than `LEVEL` of
    it, or had less than `LEVEL` of the answers left to put right.

    Training is counted by the learning rate summed over its steps: a rate that falls to 0 flattens
    every curve, however much there is left to learn. So a schedule that anneals to 0 levels off by
    overfitting or not at all (its last quarter is 58 % of the steps of a cosine): a study that is to
    decide trains at a constant rate, or for so long that valid rises. And the loss of a model that
    answers all rightly falls for ever, as its margins grow: there the answers are counted.

    Args:
        losses: of each evaluation.
        spent: the share of the summed rate that was spent by then, 0 to 1.
        errors: the share of wrong answers of each evaluation, where answers are right or wrong.

    >>> even = [0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0]
    >>> levelled_off([4.0, 3.0, 2.5, 2.2, 2.1, 2.1, 2.1, 2.09], even), levelled_off([8, 7, 6, 5, 4, 3, 2, 1], even)
    (True, False)
    >>> levelled_off([8, 7, 6, 5, 4, 3, 2, 1], even, [0.5, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0, 0.0])
    True
    """
    before = [loss for loss, share in zip(losses, spent, strict=True) if share <= _BEFORE_THE_END]
    if len(losses) < _LEAST_EVALUATIONS or not before:
        return False
    late = errors[len(before) - 1 :]
    if late and max(late) < LEVEL:
        return True
    return min(before) - min(losses) < LEVEL * min(before)


def plateau(losses: Sequence[float], doubled: Sequence[float]) -> bool:
    """Return whether twice the steps improved the mean loss over seeds by less than `LEVEL` of it.

    It asks more than `levelled_off`, which looks at one training, and costs another of twice the
    length.

    >>> plateau([2.00, 2.02], [1.99, 2.01]), plateau([2.00, 2.02], [1.90, 1.92]), plateau([2.0], [math.inf])
    (True, False, False)
    """
    before, after = fmean(losses), fmean(doubled)
    return math.isfinite(after) and before - after < LEVEL * before


def overfits(losses: Sequence[float]) -> bool:
    """Return whether the last loss on *valid* is `LEVEL` above the least, or more.

    >>> overfits([2.0, 1.8, 1.9]), overfits([2.0, 1.8, 1.81]), overfits([])
    (True, False, False)
    """
    return bool(losses) and losses[-1] - min(losses) >= LEVEL * min(losses)


@dataclass(frozen=True)
class Power:
    """What a verdict over seeds could see, stated before anything is trained."""

    seeds: Callable[[Request], Any]
    """Function of a `Request` that returns the seeds, or sizes with ``seeds``."""
    quantity: str = ""
    """What is compared, with its unit."""
    deviation: float | None = None
    """Standard deviation over seeds of the paired differences at mini scale; None where every seed
    has to agree."""
    source: str = ""
    """Where that deviation was measured."""
    tests: int | None = None
    """Tests between which Holm's correction shares the level; None where two standard errors
    decide."""
    ended: str = ""
    """What must be so besides before anything is judged."""

    def __call__(self, request: Request) -> dict[str, Any]:
        """Return seeds, smallest difference that would be seen, and what levelled off means, as
        numbers and words.

        Raises:
            ConfigError: scipy is not installed.
        """
        found = self.seeds(request)
        seeds = int(getattr(found, "seeds", found))
        smallest, words = self._smallest(seeds)
        plan = {"seeds": seeds, "smallest_seen": smallest, "chance": CHANCE, "words": words}
        return {**plan, "levelled_off": GATE + (f"; and {self.ended}" if self.ended else "")}

    def _smallest(self, seeds: int) -> tuple[float | None, str]:
        if seeds < 2:
            return None, "one training of each kind: how much seeds scatter is not known"
        if self.deviation is None:
            share = 1 - (1 - CHANCE) ** (1 / seeds)
            often = f"what fails in {share:.0%} of trainings fails here in {CHANCE:.0%}"
            return share, f"every seed has to agree: {often}"
        rule, tests = f"{ERRORS} standard errors", self.tests or 1
        how: dict[str, Any] = {"level": SIGNIFICANCE / tests, "power": CHANCE}
        if self.tests is None:
            how["critical"] = float(ERRORS)
        else:
            rule = "a paired t-test at 5 %" + (f", Holm-corrected over {tests}" * (tests > 1))
        smallest = detectable_difference(self.deviation, seeds, **how)
        return smallest, (
            f"a difference of {smallest:.2g} in {self.quantity} is seen with a chance of"
            f" {CHANCE:.0%} by {rule} (paired differences of seeds scatter by {self.deviation:g},"
            f" measured before: {self.source})"
        )
