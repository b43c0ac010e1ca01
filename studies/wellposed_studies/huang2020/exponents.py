"""The power with which a number grows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope of ln value in ln size by least squares, over the values that are finite.

    >>> round(exponent([1, 2, 4, 8], [3.0, 6.0, 12.0, float("inf")]), 6)
    1.0
    """
    points = [
        (math.log(size), math.log(y))
        for size, y in zip(sizes, values, strict=True)
        if math.isfinite(y)
    ]
    return statistics.linear_regression(*zip(*points, strict=True)).slope
