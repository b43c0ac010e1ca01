"""Common parts of benchmarks: a row, its setup, and a clock that alternates all sides.

A benchmark is a module with ``BENCHMARK = Benchmark(...)``, whose ``rows`` yields each `Row` as
soon as it is measured.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import torch

LAUNCHES = (
    "At these sizes a large GPU waits for launches: its attention takes as long at 512 tokens as at"
    " 1,024, and many small kernels cost more than few large ones."
)
T = TypeVar("T")
Call = Callable[[], object]
Times = dict[str, list[float]]
"""Seconds of every round, by side."""


@dataclass(frozen=True)
class Row:
    """A measured value with its spread: the middle 80 % of rounds, of all if there are few."""

    name: str
    value: float
    low: float
    high: float
    goal: str | None = None
    """Set here only if it depends on another row; else in `Benchmark.goals`."""
    ours: float | None = None
    other: float | None = None
    unit: str = "ms"
    """Unit of `ours` and `other`; the value is a ratio unless the name says otherwise."""

    @property
    def met(self) -> bool | None:
        """Whether the value reaches the goal; None without a goal."""
        return None if self.goal is None else reaches(self.value, self.goal)


def reaches(value: float, wanted: str) -> bool:
    """Return whether a value is ``<= x``, ``>= x`` or ``x to y``."""
    first, *rest = wanted.split()
    if rest[0] == "to":
        return float(first) <= value <= float(rest[1])
    return value <= float(rest[0]) if first == "<=" else value >= float(rest[0])


@dataclass(frozen=True)
class Side:
    """A side of a comparison; only ``run`` is timed, per repeat and share."""

    run: Call
    prepare: Call | None = None
    repeats: int = 1
    shares: int = 1


@dataclass(frozen=True)
class Setup:
    device: str = "cpu"
    threads: int = 1
    rounds: int | None = None
    quick: bool = False
    model: str | None = None
    data: str | None = None

    def size(self, usual: T, tiny: T) -> T:
        """Return ``usual``, or ``tiny`` in a test of the code."""
        return tiny if self.quick else usual

    def rounds_of(self, usual: int) -> int:
        return self.rounds or self.size(usual, 2)

    def clock(self) -> float:
        """Return processor time for one CPU thread (least disturbed), else wall-clock time."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return (
            time.process_time()
            if self.device == "cpu" and self.threads == 1
            else time.perf_counter()
        )

    def seconds(self, run: Call) -> float:
        start = self.clock()
        run()
        return self.clock() - start

    def interleave(self, sides: Mapping[str, Call | Side], rounds: int) -> Times:
        """Run all sides in each round, in rotating order; the first round is a warm-up."""
        side_by_name = {
            name: side if isinstance(side, Side) else Side(side) for name, side in sides.items()
        }
        names = list(side_by_name)
        times: Times = {name: [] for name in names}
        for turn in range(self.rounds_of(rounds) + 1):
            for index in range(len(names)):
                name = names[(index + turn) % len(names)]
                times[name].append(self._once(side_by_name[name]))
        return {name: values[1:] for name, values in times.items()}

    def _once(self, side: Side) -> float:
        total = 0.0
        for _ in range(side.repeats):
            if side.prepare is not None:
                side.prepare()
            total += self.seconds(side.run)
        return total / (side.repeats * side.shares)


@dataclass(frozen=True)
class Goal:
    """Goal of rows, and in one sentence why some miss it."""

    rows: str
    """Pattern of their names."""
    wanted: str
    """``<= x``, ``>= x`` or ``x to y``."""
    why: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")


@dataclass(frozen=True)
class Benchmark:
    """Description of a module for `python -m benchmarks`."""

    measures: str
    goal: str
    minutes: float
    """On one free core."""
    rows: Callable[[Setup], Iterator[Row]]
    devices: tuple[str, ...] = ("cpu",)
    needs: tuple[str, ...] = ()
    """Required options of ``model`` and ``data``."""
    goals: tuple[Goal, ...] = ()
    """The first that matches a row is its goal."""

    def goal_of(self, row: str, device: str) -> Goal | None:
        fits = (g for g in self.goals if device in g.devices and fnmatchcase(row, g.rows))
        return next(fits, None)


def row_of(name: str, values: list[float], goal: str | None = None, **raw: Any) -> Row:
    """Return the median of ``values`` and their spread."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return Row(
        name,
        statistics.median(ordered),
        ordered[last // 10],
        ordered[math.ceil(0.9 * last)],
        goal,
        **raw,
    )


def ratio_row(
    name: str,
    times: Times,
    ours: str,
    other: str,
    *,
    inverse: bool = False,
) -> Row:
    """Return the median ratio over rounds of times of ``ours`` and ``other``, or its inverse."""
    pairs = zip(times[ours], times[other], strict=True)
    ratios = [b / a if inverse else a / b for a, b in pairs]
    mine, theirs = (1e3 * statistics.median(times[side]) for side in (ours, other))
    return row_of(name, ratios, ours=mine, other=theirs)


def single(name: str, value: float, **raw: Any) -> Row:
    """Return a value without a spread, such as an error or a number of bytes."""
    return Row(name, value, value, value, **raw)


def in_fresh_process(call: Callable[..., T], *arguments: Any) -> T:
    """Return ``call(*arguments)`` from a new process, as a peak never falls."""
    environment = {
        "MALLOC_MMAP_THRESHOLD_": "4096",
        "MALLOC_MMAP_MAX_": "1000000",
        "OMP_NUM_THREADS": "1",
    }
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(call, *arguments).result()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def peak_mib(run: Call, device: str = "cpu") -> float:
    """Return the MiB by which ``run`` raises the memory of this process (Linux) or of the GPU."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text(
        "5", encoding="ascii"
    )  # the peak starts from the current memory
    before = _resident("VmRSS")
    run()
    return (_resident("VmHWM") - before) / 1024


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
