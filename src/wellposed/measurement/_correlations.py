"""Correlations of measured quantities across models: activation factor, entropy, accuracy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wellposed.errors import ConfigError, ShapeError, listed, missing_extra


@dataclass(frozen=True)
class Correlation:
    """A linear relation between two quantities over n models."""

    first: str
    second: str
    pearson: float
    """r, between -1 and 1."""
    p_value: float
    """Two-sided, of r = 0, if both are normal: Student's t with n - 2 degrees of freedom."""
    spearman: float
    """r of the ranks (ties share their mean rank)."""
    n: int


def correlate(
    first: Sequence[float], second: Sequence[float], *, names: tuple[str, str] = ("x", "y")
) -> Correlation:
    """Return Pearson's ``r = cov(x, y) / (std x std y)``, its p-value and n.

    Status: r is exact; the p-value is exact for independent normal pairs, approximate otherwise.
    With four models, as in Sengupta et al. (2023), |r| must exceed 0.95 to be below p = 0.05.
    Source: Student (1908).

    Args:
        first: one number for each model. second: as many. names: what they are.

    Returns:
        `Correlation`.

    Raises:
        ShapeError: different numbers of values, or fewer than three. ConfigError: a quantity that
            does not vary or is not finite, or scipy is not installed.

    Cost: O(n log n) for n models. When not to use: to claim a cause, or to test many pairs without
    a correction.

    >>> found = correlate([1, 2, 3, 4], [2, 4, 6, 9])
    >>> round(found.pearson, 4), found.n, round(found.spearman, 4)
    (0.9944, 4, 1.0)
    """
    try:
        from scipy import stats
    except ImportError as error:
        raise missing_extra("scipy", "train", "p-values") from error
    x, y = [float(value) for value in first], [float(value) for value in second]
    if len(x) != len(y) or len(x) < 3:
        received = f"{len(x)} values of {names[0]} and {len(y)} of {names[1]}"
        raise ShapeError(f"correlate: {received}; expected at least three pairs")
    for name, values in zip(names, (x, y), strict=True):
        if not all(map(math.isfinite, values)) or min(values) == max(values):
            expected = "expected finite values that are not all equal"
            raise ConfigError(f"correlate: {name} = {values}; {expected}")
    found: Any = stats.pearsonr(x, y)
    ranked: Any = stats.spearmanr(x, y)
    r, p_value, rank = map(float, (found.statistic, found.pvalue, ranked.statistic))
    return Correlation(*names, r, p_value, rank, len(x))


def correlations(models: Mapping[str, Mapping[str, float]]) -> list[Correlation]:
    """Return the `correlate` of every two quantities measured on the same models.

    Status: as `correlate`. Source: Sengupta et al. (2023, sec. 5): activation factor, entropy and
    accuracy.

    Args:
        models: model name -> quantity -> value; every model holds the same quantities, two at
            least.

    Returns:
        one `Correlation` for each two quantities, in the order of the first model.

    Raises:
        ConfigError: models with other quantities than the first, or fewer than two. Those of
            `correlate`.

    Cost: that of `correlate` for each two quantities. When not to use: see `correlate`.

    >>> rows = {"a": {"factor": 1.0, "accuracy": 0.9}, "b": {"factor": 2.0, "accuracy": 0.8}}
    >>> [round(c.pearson, 9) for c in correlations({**rows, "c": {"factor": 3.0, "accuracy": 0.7}})]
    [-1.0]
    """
    rows = models.values()
    quantities = list(next(iter(rows), {}))
    if len(quantities) < 2:
        expected = "expected at least two, measured on every model"
        raise ConfigError(f"correlations: quantities {quantities}; {expected}")
    uneven = [f"{name}: {sorted(r)}" for name, r in models.items() if set(r) != set(quantities)]
    if uneven:
        lacking = f"these models do not hold {sorted(quantities)}"
        raise ConfigError(f"correlations: {lacking}:\n{listed(uneven)}")
    pairs = itertools.combinations(quantities, 2)
    return [correlate(*([row[n] for row in rows] for n in pair), names=pair) for pair in pairs]
