"""Derive a verdict (confirmed, contradicted or undecided) from numbers with errors; no torch."""

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
"""Power: the chance of seeing a difference that exists."""

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
    " predictor and has levelled off, or stopped as the paper's did. It has levelled off if the last"
    " quarter of its training (by the summed learning rate) improved the loss on valid by less than"
    f" {LEVEL:.0%}, or began and stayed below {LEVEL:.0%} of valid answered wrongly. It needs"
    f" at least {_LEAST_EVALUATIONS} evaluations"
)
PLATEAU = (
    "for each, twice the steps, the schedule stretched with them, improve the mean loss on valid"
    f" by less than {LEVEL:.0%}, or it overfits in every seed. A model overfits if its last loss on"
    f" valid is {LEVEL:.0%} above its least or more"
)


def within(values: Sequence[float], low: float = -math.inf, high: float = math.inf) -> bool | None:
    """Return whether the mean lies in [low, high].

    None if its error bar crosses an end, or a single value has no error.

    >>> within([1.0, 1.1, 0.9], 0.5, 1.5), within([1.0, 1.1, 0.9], 2.0), within([1.0, 3.0], 2.0)
    (True, False, None)
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    mean, error = mean_and_standard_error(values)
    return inside(mean, error or 0.0, low, high)


def inside(
    mean: float, error: float, low: float = -math.inf, high: float = math.inf
) -> bool | None:
    """Return `within` for a mean and its standard error; None if that is not a number."""
    if not math.isfinite(mean + error):
        return None
    reach = ERRORS * error
    if low <= mean - reach and mean + reach <= high:
        return True
    return False if mean + reach < low or mean - reach > high else None


def every(parts: Iterable[Verdict]) -> Verdict:
    """Return whether all parts of a claim hold; one part that fails decides against it.

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
    """Return the first verdict in `order` that some part has; the last if there are no parts."""
    verdicts = set(parts)
    return next((verdict for verdict in order if verdict in verdicts), order[-1])


def gain(test: PairedComparison, claimed: float, *, parts: int = 1, rises: bool = True) -> Verdict:
    """Return whether a paired test (after `holm_correction`) shows a gain.

    True or False if the test says better or worse. "smaller" if the upper one-sided TOST at 5 %
    rules out a gain of ``claimed`` (above 0, in the unit of the metric). The ``parts`` of a claim
    share the 5 % if one is enough against it. ``rises`` is False if a loss is claimed.

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
    if most < claimed:
        return "smaller"
    return True if test.significant else None


def decided(*, holds: bool, against: bool) -> bool | None:
    """Return the side of a claim that is shown, None if neither is; evidence against it wins."""
    return False if against else True if holds else None


def agreed(of_seeds: Sequence[Verdict]) -> Verdict:
    """Return the verdict shared by every seed or reading of a claim; None if they differ.

    >>> agreed([True, True]), agreed([False, False]), agreed([True, False])
    (True, False, None)
    """
    verdict, *others = set(of_seeds)
    return None if others else verdict


def by_training(
    judge: Callable[..., Verdict],
    effect: Callable[..., Sequence[float]],
    trained: Sequence[Any],
    untrained: Sequence[Any],
) -> Verdict:
    """Return the verdict on trained models, checked against untrained ones.

    If untrained models pass too, the claim needs a larger ``effect`` after training, else None.

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
    """Return whether the last quarter gained less than `LEVEL` of the best, or errors stayed below.

    Training is counted by ``spent``, the share of the summed learning rate, since a rate that falls
    to 0 flattens every curve. A schedule that anneals to 0 levels off only by overfitting: use a
    constant rate, or train until valid rises. ``errors`` count because the loss of a model without
    errors keeps falling.

    >>> even = [0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0]
    >>> levelled_off([4.0, 3.0, 2.5, 2.2, 2.1, 2.1, 2.1, 2.09], even), levelled_off([8, 7, 6, 5, 4, 3, 2, 1], even)
    (True, False)
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

    Stricter than `levelled_off`: it needs a second training of twice the length.
    """
    before = fmean(losses)
    after = fmean(doubled)
    return math.isfinite(after) and before - after < LEVEL * before


def overfits(losses: Sequence[float]) -> bool:
    """Return whether the last loss on *valid* is at least `LEVEL` above the smallest."""
    return bool(losses) and losses[-1] - min(losses) >= LEVEL * min(losses)


@dataclass(frozen=True)
class Power:
    """Smallest effect that a verdict over seeds can detect, stated before training."""

    seeds: Callable[[Request], Any]
    """Function of a `Request` that returns the seeds, or sizes with ``seeds``."""
    quantity: str = ""
    """Compared quantity, with its unit."""
    deviation: float | None = None
    """Standard deviation of paired differences over seeds (mini); None if every seed must agree."""
    source: str = ""
    """Source of that deviation."""
    tests: int | None = None
    """Tests that share the level by Holm's correction; None if two standard errors decide."""
    ended: str = ""
    """Further condition before anything is judged."""

    def __call__(self, request: Request) -> dict[str, Any]:
        """Return seeds, detectable difference and "levelled off"; `ConfigError` without scipy."""
        sizes = self.seeds(request)
        seeds = int(getattr(sizes, "seeds", sizes))
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
        rule = f"{ERRORS} standard errors"
        tests = self.tests or 1
        test_options: dict[str, Any] = {"level": SIGNIFICANCE / tests, "power": CHANCE}
        if self.tests is None:
            test_options["critical"] = float(ERRORS)
        else:
            rule = "a paired t-test at 5 %" + (f", Holm-corrected over {tests}" * (tests > 1))
        smallest = detectable_difference(self.deviation, seeds, **test_options)
        return smallest, (
            f"a difference of {smallest:.2g} in {self.quantity} is seen with a chance of"
            f" {CHANCE:.0%} by {rule} (paired differences of seeds scatter by {self.deviation:g},"
            f" measured before: {self.source})"
        )
