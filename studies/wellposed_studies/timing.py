"""How long calls take beside one another."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


def timing_device() -> str:
    """Return the device that speeds are measured on: a GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def median_seconds(
    calls: Mapping[str, Callable[[], Any]], repeats: int, *, warmup: int
) -> dict[str, float]:
    """Return the median time of each call over ``repeats`` rounds after ``warmup`` rounds; the
    calls take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(warmup + repeats):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values[warmup:]) for name, values in times.items()}
