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
ABOUT = 2
"""Factor, either way, within which an effect counts as that of the paper."""
LEVEL = 0.01
_LEAST_EVALUATIONS = 8
_BEFORE_THE_END = 0.75
_HALF = 0.5
STILL_LEARNING = "was still learning"
OVERFITS = "overfits: read more"
GATE = (
    f"nothing is judged before every model is {LEARNED} standard errors better than a constant"
    " predictor and has levelled off, or stopped as the paper's did. It has levelled off if the last"
    " quarter of its training (by the summed learning rate) improved the loss on valid by less than"
    f" {LEVEL:.0%}, and that on train by less or by noise. Below {LEVEL:.0%} of valid answered"
    f" wrongly, it is level too. A last loss on valid {LEVEL:.0%} above its least is overfitting: it"
    f" is not level, it has to read more. It needs at least {_LEAST_EVALUATIONS} evaluations"
)
PLATEAU = (
    "for each, twice the steps, the schedule stretched with them, improve the mean loss on valid"
    f" by less than {LEVEL:.0%}, and no seed overfits. A model overfits if its last loss on"
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


def as_printed(values: Sequence[float], printed: float) -> Verdict:
    """Return whether an effect is that of the paper, up to a factor `ABOUT` either way.

    "smaller" if it is surely below ``printed / ABOUT`` on either side of 0. False if it is surely
    reversed, or larger than ``ABOUT * printed``. None if its error bar crosses an end.

    >>> [as_printed(3 * [x], 0.05) for x in (0.05, 0.0, -0.05, 0.125)]
    [True, 'smaller', False, False]
    """
    if within(values, printed / ABOUT, ABOUT * printed):
        return True
    if within(values, -printed / ABOUT, printed / ABOUT):
        return "smaller"
    reversed_ = within(values, low=-printed / ABOUT) is False
    larger = within(values, high=ABOUT * printed) is False
    return False if reversed_ or larger else None


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
    losses: Sequence[float],
    spent: Sequence[float],
    errors: Sequence[float] = (),
    trained: Sequence[tuple[float, float]] = (),
) -> bool:
    """Return whether a training has levelled off on held-out data and on train, see `unsettled`.

    >>> even = [0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0]
    >>> levelled_off([4.0, 3.0, 2.5, 2.2, 2.1, 2.1, 2.1, 2.09], even), levelled_off([8, 7, 6, 5, 4, 3, 2, 1], even)
    (True, False)
    >>> levelled_off([4.0, 3.0, 2.5, 2.2, 2.1, 2.1, 2.2, 2.4], even)  # it overfits
    False
    """
    return not unsettled(losses, spent, errors, trained)


def unsettled(
    losses: Sequence[float],
    spent: Sequence[float],
    errors: Sequence[float] = (),
    trained: Sequence[tuple[float, float]] = (),
) -> str:
    """Return why a training has not levelled off: `STILL_LEARNING` or `OVERFITS`; empty if it has.

    Training is counted by shares of the summed learning rate, since a rate that falls to 0 flattens
    every curve.

    Args:
        losses: on valid.
        spent: share at each of them.
        errors: wrong answers on valid. They count because the loss of a model without errors keeps
            falling.
        trained: share and loss on train.
    """
    before = [loss for loss, share in zip(losses, spent, strict=True) if share <= _BEFORE_THE_END]
    if len(losses) < _LEAST_EVALUATIONS or not before:
        return STILL_LEARNING
    late = errors[len(before) - 1 :]
    if late and max(late) < LEVEL:
        return ""
    if overfits(losses):
        return OVERFITS
    gains = min(before) - min(losses) >= LEVEL * min(before)
    return STILL_LEARNING if gains or _falls(trained) else ""


def _falls(trained: Sequence[tuple[float, float]]) -> bool:
    """Return whether the last quarter improved the mean loss on train, beyond its noise."""
    before = [loss for share, loss in trained if _HALF < share <= _BEFORE_THE_END]
    late = [loss for share, loss in trained if share > _BEFORE_THE_END]
    if len(before) < ERRORS or len(late) < ERRORS:
        return False
    (first, noise), (last, noise_late) = (mean_and_standard_error(part) for part in (before, late))
    reach = ERRORS * math.hypot(noise or 0.0, noise_late or 0.0)
    return first - last > max(LEVEL * first, reach)


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
    gate: str = GATE
    """What every model has to be before anything is judged."""

    def __call__(self, request: Request) -> dict[str, Any]:
        """Return seeds, detectable difference and "levelled off"; `ConfigError` without scipy."""
        sizes = self.seeds(request)
        seeds = int(getattr(sizes, "seeds", sizes))
        smallest, words = self._smallest(seeds)
        plan = {"seeds": seeds, "smallest_seen": smallest, "chance": CHANCE, "words": words}
        return {**plan, "levelled_off": self.gate + (f"; and {self.ended}" if self.ended else "")}

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
