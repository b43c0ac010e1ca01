"""What every benchmark here shares: a row, the setup it is measured under, and a clock that takes
all sides in turns.

A benchmark is a module with ``BENCHMARK = Benchmark(...)``, whose ``rows`` yields a `Row` as soon
as it is measured.
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
    """A measured value with its spread: the middle 80 % of rounds, all of them where there are
    few."""

    name: str
    value: float
    low: float
    high: float
    goal: str | None = None
    """Set here only where it depends on another row; else it is in `Benchmark.goals`."""
    ours: float | None = None
    other: float | None = None
    unit: str = "ms"
    """Of `ours` and `other`; the value is a plain number, a ratio unless the name says
    otherwise."""

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
    """One of the things compared: ``prepare`` is not timed, and a time is that of ``run`` over
    repeats and shares."""

    run: Call
    prepare: Call | None = None
    repeats: int = 1
    shares: int = 1


@dataclass(frozen=True)
class Setup:
    """Where and how long to measure."""

    device: str = "cpu"
    threads: int = 1
    rounds: int | None = None
    quick: bool = False
    model: str | None = None
    data: str | None = None

    def size(self, usual: T, tiny: T) -> T:
        """Return ``usual``, or ``tiny`` where only the code is tried out."""
        return tiny if self.quick else usual

    def rounds_of(self, usual: int) -> int:
        """Return how many rounds count."""
        return self.rounds or self.size(usual, 2)

    def clock(self) -> float:
        """Processor time on one thread, which other work on the machine disturbs least; else the
        clock on the wall."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return (
            time.process_time()
            if self.device == "cpu" and self.threads == 1
            else time.perf_counter()
        )

    def seconds(self, run: Call) -> float:
        """Time one call."""
        start = self.clock()
        run()
        return self.clock() - start

    def interleave(self, sides: Mapping[str, Call | Side], rounds: int) -> Times:
        """Run all sides in every round, each beginning with another; the first round warms caches
        and is left out."""
        known = {
            name: side if isinstance(side, Side) else Side(side) for name, side in sides.items()
        }
        names = list(known)
        times: Times = {name: [] for name in names}
        for turn in range(self.rounds_of(rounds) + 1):
            for place in range(len(names)):
                name = names[(place + turn) % len(names)]
                times[name].append(self._once(known[name]))
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
    """What rows should reach, and in one sentence why those that miss it do."""

    rows: str
    """Their names, with ``*`` for anything."""
    wanted: str
    """``<= x``, ``>= x`` or ``x to y``."""
    why: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")


@dataclass(frozen=True)
class Benchmark:
    """What `python -m benchmarks` knows of a module."""

    measures: str
    goal: str
    minutes: float
    """By the clock of one free core."""
    rows: Callable[[Setup], Iterator[Row]]
    devices: tuple[str, ...] = ("cpu",)
    needs: tuple[str, ...] = ()
    """Of ``model`` and ``data``, those without which there is nothing to measure."""
    goals: tuple[Goal, ...] = ()
    """The first whose names fit a row is its goal."""

    def goal_of(self, row: str, device: str) -> Goal | None:
        """Return the goal of the row of this name."""
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
    """Return the median over rounds of the time of ``ours`` over that of ``other``; the inverse is
    how often faster."""
    pairs = zip(times[ours], times[other], strict=True)
    ratios = [b / a if inverse else a / b for a, b in pairs]
    mine, theirs = (1e3 * statistics.median(times[side]) for side in (ours, other))
    return row_of(name, ratios, ours=mine, other=theirs)


def single(name: str, value: float, **raw: Any) -> Row:
    """Return a value that has no spread, such as an error or a number of bytes."""
    return Row(name, value, value, value, **raw)


def in_fresh_process(call: Callable[..., T], *arguments: Any) -> T:
    """Return ``call(*arguments)`` from a new process (a peak never falls), where every tensor has
    its own pages."""
    given = {
        "MALLOC_MMAP_THRESHOLD_": "4096",
        "MALLOC_MMAP_MAX_": "1000000",
        "OMP_NUM_THREADS": "1",
    }
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
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
    """Return by how many MiB ``run`` raises the memory of this process at most (Linux), or that of
    the GPU."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text(
        "5", encoding="ascii"
    )  # the peak starts from what is held now
    before = _resident("VmRSS")
    run()
    return (_resident("VmHWM") - before) / 1024


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
