"""Clocks that jump: back and forth by seconds to decades while a command runs, and files from any
year.

Right: the same end as with a clock that goes. A wrong date may be written down; nothing may depend
on it.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.faults.children import fork, orphans, wait
from tools.faults.kills import Job, check_names, difference, shared_out, undisturbed
from tools.faults.outcome import Fault, Row
from tools.faults.toys import Toys

JUMPS = (-1e9, -86_400.0, -3600.0, -1.0, 0.0, 1.0, 3600.0, 86_400.0, 1e9)
YEARS = (0, 1, 315_532_799, 946_684_800, 4_102_444_800, 17_000_000_000)


def run(toys: Toys, count: int, seed: int, only: str = "") -> Iterator[Row]:
    """Run every command ``count`` times in all under clocks that jump, half of the times with a
    kill between."""
    for job, wanted in shared_out(toys, count, only):
        row = Row("clock", job.name, unit="runs")
        draw = random.Random(f"{seed}/{job.name}")
        whole, duration = undisturbed(job, toys.root / "clock" / "whole", toys)
        for _ in range(wanted):
            _trial(job, row, draw, duration, whole, toys)
        yield row


def jumping(draw: random.Random) -> None:
    """Make ``time.time`` of this process jump at every fourth call or so."""
    true = time.time
    offset = [draw.choice(JUMPS)]

    def now() -> float:
        if draw.random() < 0.25:
            offset[0] = draw.choice(JUMPS)
        return max(0.0, true() + offset[0])

    time.time = now
    time.time_ns = lambda: int(now() * 1e9)


def _trial(
    job: Job, row: Row, draw: random.Random, duration: float, whole: dict[str, Any], toys: Toys
) -> None:
    row.tried += 1
    out = toys.root / "clock" / "run"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    log = toys.root / "clock.log"
    number = draw.randrange(1 << 30)
    killed = draw.random() < 0.5
    case = f"{job.name}: clock {number}{', killed' if killed else ''}"

    def work() -> int:
        from wellposed.cli import main

        jumping(random.Random(number))
        return main(job.words(out))

    log.unlink(missing_ok=True)
    child = fork(work, log)
    if killed:
        time.sleep(draw.uniform(0, duration))
        os.kill(child, signal.SIGKILL)
    status = wait(child, 300)
    orphans(child)
    for path in [out, *out.rglob("*")]:
        moment = draw.choice(YEARS)
        os.utime(path, (moment, moment))
    if not killed:
        _expect_success(status, case, log, row)
    if broken := check_names(out):
        row.add(Fault("wrong", case, f"not whole: {', '.join(broken)}"))
    log.unlink(missing_ok=True)
    if _expect_success(wait(fork(work, log), 300), f"{case}, again", log, row):
        row.add(*difference(job, out, whole, case))


def _expect_success(status: int | None, case: str, log: Path, row: Row) -> bool:
    if status == 0:
        return True
    said = log.read_text(errors="replace")
    kind = "hung" if status is None else "foreign" if "Traceback" in said else "lost"
    row.add(Fault(kind, case, f"exit status {status}: {said[-500:]}"))
    return False
