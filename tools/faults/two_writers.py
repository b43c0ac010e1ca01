"""Two or three processes at once on one folder: a run, a comparison, a page.

Right: each ends well or is refused in one line that names who has the folder, and what is left is
what one alone leaves.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from typing import Any

from tools.faults.children import start_command, wait
from tools.faults.kills import Job, check_names, difference, shared_out, undisturbed
from tools.faults.outcome import Fault, Row
from tools.faults.toys import Toys


def run(toys: Toys, count: int, seed: int, only: str = "") -> Iterator[Row]:
    """Start every command ``count`` times in all, two or three at a time."""
    for job, wanted in shared_out(toys, count, only):
        row = Row("two writers", job.name, unit="meetings")
        draw = random.Random(f"{seed}/{job.name}")
        whole, duration = undisturbed(job, toys.root / "writers" / "whole", toys)
        for _ in range(wanted):
            _trial(job, row, draw, duration, whole, toys)
        yield row


def _trial(
    job: Job, row: Row, draw: random.Random, duration: float, whole: dict[str, Any], toys: Toys
) -> None:
    row.tried += 1
    out = toys.root / "writers" / "shared"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    delays = [
        0.0,
        *(
            round(draw.choice((0.0, draw.uniform(0, duration))), 3)
            for _ in range(draw.choice((1, 1, 2)))
        ),
    ]
    case = f"{job.name}: starts {delays} s apart"
    logs = [toys.root / f"writer-{number}.log" for number in range(len(delays))]
    children = []
    for delay, log in zip(delays, logs, strict=True):
        log.unlink(missing_ok=True)
        time.sleep(delay)
        children.append(start_command(job.words(out), log))
    ended = [wait(child, 300) for child in children]
    for status, log in zip(ended, logs, strict=True):
        said = log.read_text(errors="replace")
        if status is None:
            row.add(Fault("hung", case, said[-400:]))
        elif status not in (0, 1, 2) or "Traceback" in said:
            row.add(Fault("foreign", case, f"exit status {status}: {said[-500:]}"))
        elif status != 0 and "process" not in said:
            row.add(Fault("unclear", case, said[-500:]))
    if 0 not in ended:
        row.add(Fault("lost", case, f"none of them ended well: {ended}"))
    if broken := check_names(out):
        row.add(Fault("wrong", case, f"not whole: {', '.join(broken)}"))
    log = logs[0]
    log.unlink(missing_ok=True)
    status = wait(start_command(job.words(out), log), 300)
    if status != 0:
        row.add(
            Fault("lost", case, f"the next start: exit status {status}: {log.read_text()[-500:]}")
        )
    else:
        row.add(*difference(job, out, whole, case))
