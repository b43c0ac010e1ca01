"""Statistics of a comparison over seeds. Tests need scipy; without it they raise `ConfigError`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from wellposed.errors import DataError, import_extra

SIGNIFICANCE = 0.05
SHOWN = 1e-4
"""Smallest difference that four digits show, relative to the values."""
_MOST_SEEDS = 100
# Relative size below which a spread of differences is only rounding, not a variance.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Failure:
    """Why a run has no number: ``status`` failed | cancelled | unfinished, and the reason."""

    status: str
    reason: str


@dataclass(frozen=True)
class SeedResults:
    """Results of a variant by seed: a number if the run finished, else the reason why not."""

    name: str
    values: Mapping[int, float]
    failures: Mapping[int, Failure] = field(default_factory=dict)

    @property
    def ended(self) -> str:
        """How the others ended: ``failed``, or ``did not finish`` if some stopped or still run."""
        statuses = {failure.status for failure in self.failures.values()}
        return "failed" if statuses <= {"failed"} else "did not finish"

    def __str__(self) -> str:
        """The failures in words, for instance ``1 of 3 seeds failed (diverged at step 40)``."""
        seeds = len({*self.values, *self.failures})
        reasons = dict.fromkeys(f.reason for _, f in sorted(self.failures.items()))
        some = f"{len(self.failures)} of {seeds} seed{'s' if seeds > 1 else ''}"
        return f"{some} {self.ended} ({'; '.join(reasons)})"


@dataclass(frozen=True)
class PairedComparison:
    """A variant against the baseline on the same seeds: ``mean_difference`` is variant - baseline.

    The ``p_value`` is of the two-sided paired t-test, or None without one (one pair, zero spread
    around a non-zero mean, or an ``obstacle``). In ``p_holm`` it has Holm's correction over all
    variants.
    """

    pairs: int
    mean_difference: float | None
    """``None`` if no seed has a number on both sides."""
    standard_error: float | None
    t_statistic: float | None
    p_value: float | None
    p_holm: float | None
    higher_is_better: bool
    obstacle: str = ""
    """Why there is no verdict: failed seeds on either side, without which the sample is biased."""
    scale: float = 0.0
    """Largest magnitude of the values of both sides."""

    @property
    def significant(self) -> bool:
        """Whether corrected p < 0.05, without obstacle, and four digits show the difference."""
        tested = self.p_holm is not None and self.p_holm < SIGNIFICANCE and not self.obstacle
        return tested and abs(self.mean_difference or 0.0) >= SHOWN * self.scale

    @property
    def verdict(self) -> str:
        if self.obstacle or self.mean_difference is None:
            return f"undecided: {self.obstacle}"
        seeds = f"{self.pairs} seed{'s' if self.pairs != 1 else ''}"
        if self.pairs < 2:
            text = "no significant difference can be claimed (one seed: no test)"
            return f"{text}; difference {self.mean_difference:+.4g}"
        if self.p_value is None or self.p_holm is None:
            text = f"no test: the difference is {self.mean_difference:+.4g} on every one of {seeds}"
            return f"{text}, so there is no spread to test with"
        if self.t_statistic is None:
            return f"no significant difference (equal on all {seeds})"

        holm = "" if self.p_holm == self.p_value else f", Holm {self.p_holm:.3g}"
        p = f"p = {self.p_value:.3g}{holm}"
        if not self.significant:
            kind = (
                "significant difference"
                if self.p_holm >= SIGNIFICANCE
                else "difference in 4 digits"
            )
            return f"no {kind} ({self.mean_difference:+.4g}; {p}, {seeds})"
        side = "better" if (self.mean_difference > 0) == self.higher_is_better else "worse"

        return f"{side} by {abs(self.mean_difference):.4g} ({p}, {seeds})"

    @property
    def interval(self) -> tuple[float, float] | None:
        """The uncorrected 95 % interval of the mean difference by Student's t, or None."""
        if self.mean_difference is None or self.standard_error is None or self.p_value is None:
            return None
        quantile = float(_special().stdtrit(self.pairs - 1, 1 - SIGNIFICANCE / 2))
        reach = quantile * self.standard_error
        return self.mean_difference - reach, self.mean_difference + reach


def _special() -> Any:
    return import_extra("scipy.special", "compare", "paired tests")


def mean_and_standard_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and ``s / sqrt(n)`` with ``s^2 = sum (x - mean)^2 / (n - 1)``, or None.

    No value, or one that is not finite, is a `DataError`.

    >>> mean_and_standard_error([1.0, 2.0, 3.0, 6.0, 8.0])  # s^2 = 34 / 4, n = 5
    (4.0, 1.3038404810405297)
    """
    _require_finite(values)
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, math.sqrt(variance / count)


def paired_comparison(
    values: Sequence[float], first: Sequence[float], *, higher_is_better: bool = True
) -> PairedComparison:
    """Test the mean of ``values[i] - first[i]`` against 0, by ``t = mean / (s / sqrt(n))``.

    Status: exact for normally distributed differences (Student, 1908). The verdict is "no
    significant difference" if ``p >= 0.05``, and "no test" for one pair. If all pairs are equal,
    ``p = 1``; equal non-zero differences have no variance, so ``p`` is ``None``.

    Args:
        values: one number per seed, of the variant.
        first: the numbers of the first variant on the same seeds, in the same order.
        higher_is_better: whether a positive difference is an improvement.

    Returns:
        The test with ``p_holm = p_value``; for several variants see `holm_correction`.

    Raises:
        DataError: different lengths, no value, a value that is not finite.

    When not to use: with fewer than about five seeds only large effects are detected; no detected
    difference is not evidence of equality.

    >>> paired_comparison([3.0, 4.0, 6.0], [1.0, 2.0, 3.0]).verdict  # t = 7, p = 0.0198
    'better by 2.333 (p = 0.0198, 3 seeds)'
    """
    if len(values) != len(first):
        raise DataError(
            f"a paired test needs equal lengths, received {len(values)} and {len(first)} values"
        )

    _require_finite([*values, *first])
    differences = [value - base for value, base in zip(values, first, strict=True)]
    mean, error = mean_and_standard_error(differences)
    pairs = len(differences)
    scale = max(map(abs, [*values, *first]))
    if abs(mean) <= ROUNDING * scale:  # what is left of differences that cancel
        mean = 0.0

    t = p = None
    if error is not None:
        if not any(differences):
            p = 1.0
        elif error > ROUNDING * scale:
            t = mean / error
            p = float(2 * _special().stdtr(pairs - 1, -abs(t)))

    return PairedComparison(pairs, mean, error, t, p, p, higher_is_better, scale=scale)


def compare_seeds(
    variant: SeedResults, baseline: SeedResults, *, higher_is_better: bool = True
) -> PairedComparison:
    """Return `paired_comparison` over the seeds that ``variant`` and ``baseline`` share.

    If a seed failed on either side, there is no verdict. Seeds fail because they do badly, so a
    mean over the others is biased.

    >>> baseline = SeedResults("post_ln", {0: 1.0, 1: 2.0, 2: 3.0})
    >>> failed = {2: Failure("failed", "diverged at step 40")}
    >>> compare_seeds(SeedResults("rezero", {0: 3.0, 1: 4.1}, failed), baseline).verdict
    'undecided: 1 of 3 seeds failed (diverged at step 40)'
    """
    shared = sorted(variant.values.keys() & baseline.values.keys())
    obstacles = [str(variant)] if variant.failures else []
    if baseline.failures:
        baseline_text = f": {baseline}" if baseline.values else f" {baseline.ended} on all seeds"
        obstacles.append(f"the baseline {baseline.name}{baseline_text}")
    if not shared and not obstacles:
        obstacles.append(f"no seed is shared with the baseline {baseline.name}")

    values, first = ([side.values[seed] for seed in shared] for side in (variant, baseline))
    if not obstacles:
        return paired_comparison(values, first, higher_is_better=higher_is_better)

    differences = [value - base for value, base in zip(values, first, strict=True)]
    mean = mean_and_standard_error(differences)[0] if shared else None
    return PairedComparison(
        pairs=len(shared),
        mean_difference=mean,
        standard_error=None,
        t_statistic=None,
        p_value=None,
        p_holm=None,
        higher_is_better=higher_is_better,
        obstacle="; ".join(obstacles),
    )


def holm_correction(comparisons: Sequence[PairedComparison]) -> list[PairedComparison]:
    """Return the comparisons with ``p_holm = p_(k) (m - k + 1)`` (ascending, monotone, at most 1).

    Holm (1979): bounds the chance of any false "different" among the m tests by the level.
    Comparisons without a test are unchanged and not counted in m.

    >>> import dataclasses
    >>> one = paired_comparison([3.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    >>> [round(c.p_holm, 3) for c in holm_correction([one, dataclasses.replace(one, p_value=0.5)])]
    [0.04, 0.5]
    """
    tested = sorted(c.p_value for c in comparisons if c.p_value is not None)
    steps = (min(1.0, p * (len(tested) - rank)) for rank, p in enumerate(tested))
    corrected = dict(zip(reversed(tested), reversed([*accumulate(steps, max)]), strict=True))
    return [
        replace(c, p_holm=None if c.p_value is None else corrected[c.p_value]) for c in comparisons
    ]


def detectable_difference(
    deviation: float,
    pairs: int,
    *,
    level: float = SIGNIFICANCE,
    critical: float | None = None,
    power: float = 0.8,
) -> float:
    """Return the smallest true mean difference that a paired test over ``pairs`` seeds can detect.

    It is ``delta = nc s / sqrt(n)``. For ``T`` of Student's noncentral distribution (n - 1 degrees
    of freedom, noncentrality ``nc``), ``P(T > t) = power`` at the two-sided quantile ``t``.

    Status: relative error below 1e-3 for normal differences (the other tail is neglected).

    Args:
        deviation: Standard deviation s of the paired differences over seeds.
        pairs: Seeds on either side, at least 2.
        level: Of the two-sided test; divide it by the number of tests for Holm's first step.
        critical: Standard errors that decide instead of the quantile, such as 2.
        power: Probability of detection.

    Raises:
        DataError: fewer than 2 pairs, or a deviation that is negative or not finite.

    When not to use: after the experiment, with the deviation of the experiment itself.

    >>> round(detectable_difference(1.0, 5), 2), round(detectable_difference(1.0, 3), 2)
    (1.68, 3.26)
    """
    if pairs < 2 or not 0 <= deviation < math.inf:
        raise DataError(
            f"detectable_difference: expected pairs >= 2 and a deviation >= 0, got {pairs} and"
            f" {deviation}"
        )
    special = _special()
    degrees = pairs - 1
    if critical is None:
        critical = -float(special.stdtrit(degrees, level / 2))
    shift = float(special.nctdtrinc(degrees, 1 - power, critical))
    return shift * deviation / math.sqrt(pairs)


def learning_margin(reference: float, examples: int | None, *, share: bool) -> float:
    """Return by how much a model must beat the best constant answer to have learned.

    For a ``share`` of ``examples``: two standard errors ``2 sqrt(r (1 - r) / n)``, a one-sided
    binomial test at 2.3 %. For other metrics: a hundredth of the reference.

    >>> learning_margin(0.5, 400, share=True), learning_margin(2.0, 400, share=False)
    (0.05, 0.02)
    """
    if share and examples and 0 <= reference <= 1:
        return 2 * math.sqrt(reference * (1 - reference) / examples)
    return abs(reference) / 100


def largest_gain(c: PairedComparison, level: float) -> float | None:
    """Return the upper end of the one-sided interval of the gain, ``mean + t s / sqrt(n)``, or
    None. A larger true gain gives such differences with probability at most ``level``.

    >>> round(largest_gain(paired_comparison([3.0, 4.0, 6.0], [1.0, 2.0, 3.0]), 0.05), 3)
    3.307
    """
    if c.obstacle or c.mean_difference is None or c.standard_error is None:
        return None
    gain = c.mean_difference if c.higher_is_better else -c.mean_difference
    return gain - float(_special().stdtrit(c.pairs - 1, level)) * c.standard_error


def worth_it(c: PairedComparison, smallest: float, *, tests: int = 1) -> str:
    """Return "worth it", "not worth it" or "undecided" for a gain of ``smallest``, and why.

    Worth it: the paired test says better (p < 0.05 after Holm) and the mean gain is at least
    ``smallest``. Not worth it: the interval of the gain, ``mean +- t s / sqrt(n)`` at 1 - 0.05 /
    ``tests``, ends below it. Otherwise the text says how many seeds would tell (power 0.8).

    Status: exact for normally distributed differences. "Worth it" has probability at most 0.025 if
    the true gain is 0 or less, as has "not worth it" if it is ``smallest`` or more.

    Args:
        c: The comparison, after `holm_correction` if there are several.
        smallest: Smallest gain that counts, in the unit of the metric, above 0.
        tests: Variants compared with the same first one.

    >>> worth_it(paired_comparison([1.0, 2.0, 3.1], [1.0, 2.0, 3.0]), 0.5)
    'not worth it: the gain is 0.03333 and at most 0.1768, less than 0.5 (95 %, 3 seeds)'
    """
    if c.obstacle or c.mean_difference is None or c.standard_error is None:
        reason = c.obstacle or "one seed has no test, so give --seeds 3 or more"
        return f"undecided: {reason}"

    gain = c.mean_difference if c.higher_is_better else -c.mean_difference
    seeds = f"{c.pairs} seeds"
    level = SIGNIFICANCE / tests
    if c.t_statistic is None:
        if gain == 0:
            return f"not worth it: equal on all {seeds}"
        return f"undecided with {seeds}: {c.verdict}"
    if c.significant and gain >= smallest:
        p = f"p = {c.p_holm:.3g}, {seeds}"
        return f"worth it: better by {gain:.4g}, at least {smallest:.3g} was asked ({p})"

    reach = (largest_gain(c, level / 2) or 0.0) - gain
    sure = f"{100 * (1 - level):.3g} %"
    if gain + reach < smallest:
        most = f"the gain is {gain:.4g} and at most {gain + reach:.4g}, less than {smallest:.3g}"
        return f"not worth it: {most} ({sure}, {seeds})"

    between = f"between {gain - reach:.4g} and {gain + reach:.4g} ({sure})"
    deviation = c.standard_error * math.sqrt(c.pairs)
    counts = range(c.pairs + 1, _MOST_SEEDS)
    sees = (n for n in counts if detectable_difference(deviation, n, level=level) <= smallest)
    count = next(sees, _MOST_SEEDS)
    needed = f"about {count}" if count < _MOST_SEEDS else f"{_MOST_SEEDS} or more"
    more = f"{needed} seeds would see {smallest:.3g}"
    return f"undecided with {seeds}: the gain is {gain:.4g}, {between}; {more}"


def _require_finite(values: Sequence[float]) -> None:
    if not values:
        raise DataError("statistics need at least one value, received none")
    bad = [value for value in values if not math.isfinite(value)]
    if bad:
        raise DataError(f"statistics need finite values, received {bad[:3]} among {len(values)}")
