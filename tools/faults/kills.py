"""Signals at random moments of every command that writes, and two or three of it at once.

Expected: a command that is started again ends bit for bit as an undisturbed one. No half-written
file has a final name, and no process is left. A signal that asks is answered within seconds,
without a traceback, and never ignored. Of several writers each ends well, or is refused in one line
that names the owner of the folder.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.faults.harness import Answer, Row, orphans, run, start, wait
from tools.faults.toys import Toys, leaves

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP)
ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MOMENTS = (
    "compare.json",
    "*/seed-0/metrics.jsonl",
    "*/seed-0/measure-final.json",
    "*/seed-0/result.json",
)
"""Files of a comparison; when the first appears, runs are left to train."""
ANSWER_SECONDS = 60.0
INTERRUPTED = 130


@dataclass(frozen=True)
class Job:
    """A command that writes below ``out``."""

    name: str
    share: float
    words: Callable[[Path], list[str]]


def jobs(toys: Toys) -> list[Job]:
    """Return every command that writes, and its share of the tries."""
    classifier = toys.finished("classifier")
    figure = ["reproduce", "kim2021/figure-2", "--scale", "toy", "--quiet", "--out"]
    return [
        Job("train", 0.45, lambda out: toys.train(out / "run")),
        Job("compare", 0.2, lambda out: toys.compare(out / "all")),
        Job("reproduce", 0.05, lambda out: [*figure, str(out / "all")]),
        Job("measure", 0.1, lambda out: ["measure", str(classifier), "--out", str(out / "m")]),
        Job("certify", 0.1, lambda out: [*toys.certify(classifier), "--out", str(out / "c")]),
        Job("predict", 0.1, lambda out: toys.predict(classifier, out / "l.txt")),
    ]


def kills(toys: Toys, count: int, seed: int) -> Iterator[Row]:
    """Deliver ``count`` signals to living commands, each followed by the command again."""
    for job in jobs(toys):
        row = Row(job.name, "signals")
        draw = random.Random(f"{seed}/{job.name}")
        expected, duration = _undisturbed(job, toys)
        for number in range(4 * round(count * job.share)):
            if row.tried >= round(count * job.share):
                break
            out = _fresh(toys.root / "killed")
            for _ in range(draw.choice((1, 1, 2))):
                moment = draw.uniform(0, duration)
                row.tried += _signalled(job, out, SIGNALS[number % len(SIGNALS)], moment, row, toys)
            _finish(job, out, expected, row, f"{job.name}: try {number}", toys)
        yield row
    yield stops(toys, count)


def stops(toys: Toys, count: int) -> Row:
    """Ask a comparison to stop at moments of its runs, when it must, and say how to continue."""
    row, log = Row("compare, between its runs", "signals"), toys.root / "kill.log"
    job = next(j for j in jobs(toys) if j.name == "compare")
    expected, _ = _undisturbed(job, toys)
    for number, moment in itertools.islice(itertools.product(ASKING, MOMENTS), count):
        row.tried += 1
        out, case = _fresh(toys.root / "stopped"), f"compare: {number.name} when there is {moment}"
        child, deadline = start(job.words(out), log), time.monotonic() + ANSWER_SECONDS
        while not any((out / "all").glob(moment)) and time.monotonic() < deadline:
            time.sleep(0.002)
        os.kill(child, number)
        status, output = wait(child, ANSWER_SECONDS), log.read_text(errors="replace")
        if status != INTERRUPTED or "continue with: wellposed compare" not in output:
            row.add("wrong", case, f"exit status {status}: {output[-600:]}")
        _finish(job, out, expected, row, case, toys)
    return row


def writers(toys: Toys, count: int, seed: int) -> Iterator[Row]:
    """Start every command two or three times at once, ``count`` times in all."""
    for job in jobs(toys):
        row = Row(job.name, "meetings")
        draw = random.Random(f"{seed}/{job.name}")
        expected, duration = _undisturbed(job, toys)
        for _ in range(max(1, round(count * job.share))):
            row.tried += 1
            out = _fresh(toys.root / "shared")
            delays = [0.0] + [draw.uniform(0, duration) for _ in range(draw.choice((1, 1, 2)))]
            case = f"{job.name}: starts {', '.join(f'{delay:.3f}' for delay in delays)} s apart"
            children = []
            for number, delay in enumerate(delays):
                time.sleep(delay)
                log = toys.root / f"writer-{number}.log"
                children.append((start(job.words(out), log), log))
            ended = [Answer(wait(child, 300), log.read_text()) for child, log in children]
            for answer in ended:
                if kind := answer.fault():
                    row.add(kind, case, answer.output[-500:])
                elif answer.status and "process" not in answer.output:
                    row.add("unclear", case, answer.output[-500:])
            if all(answer.status for answer in ended):
                row.add("lost", case, "none of them ended well")
            _finish(job, out, expected, row, case, toys)
        yield row


def _undisturbed(job: Job, toys: Toys) -> tuple[dict[str, Any], float]:
    """Return what a command leaves that nobody disturbs, and the seconds it takes."""
    toys.make(job.words(_fresh(toys.root / "whole")))  # the first time is slower
    out, began = _fresh(toys.root / "whole"), time.monotonic()
    toys.make(job.words(out))
    return leaves(out), time.monotonic() - began


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _signalled(
    job: Job, out: Path, number: signal.Signals, moment: float, row: Row, toys: Toys
) -> bool:
    """Signal one command; return whether the signal met it alive."""
    log = toys.root / "kill.log"
    child = start(job.words(out), log)
    time.sleep(moment)
    os.kill(child, number)
    status = wait(child, ANSWER_SECONDS)
    text, case = log.read_text(errors="replace"), f"{job.name}: {number.name} after {moment:.3f} s"
    if status is None:
        row.add("hung", case, f"no end within {ANSWER_SECONDS:g} s")
    elif "Traceback" in text or status not in (0, INTERRUPTED, -number):
        row.add("foreign", case, f"exit status {status}: {text[-600:]}")
    if left := orphans(child):
        row.add("orphan", case, f"{left} processes")
    _check_whole(out, row, case)
    return status != 0


def _check_whole(out: Path, row: Row, case: str) -> None:
    for path in out.rglob("*.json"):
        if not any(part.startswith(".") for part in path.relative_to(out).parts):
            try:
                json.loads(path.read_bytes())
            except ValueError:
                row.add("wrong", case, f"{path.relative_to(out)} is not whole")


def _finish(job: Job, out: Path, expected: dict[str, Any], row: Row, case: str, toys: Toys) -> None:
    """Start a command again and compare what it leaves with what one alone leaves."""
    again = run(job.words(out), toys.root / "again.log", 300)
    if again.status != 0:
        row.add("lost", case, f"the next start: {again.status}: {again.output[-600:]}")
        return
    if different := differences(expected, leaves(out)):
        row.add("wrong", case, f"different from undisturbed: {', '.join(different)}")


def differences(expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    """Return the names of files that are not the same on both sides."""
    return [name for name in {**expected, **actual} if expected.get(name) != actual.get(name)]
