"""Signals at random moments of real processes of every command that writes; then the command again,
to its end.

Right: the end is bit for bit that of a command which nobody disturbed, nothing half written carries
a good name, no process is left over, and a signal that asks is answered within seconds and without
a traceback.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tools.faults.children import orphans, start_command, wait
from tools.faults.outcome import Fault, Row, chosen
from tools.faults.toys import Toys, json_of, make, make_folders, timeless

SIGNALS = (
    signal.SIGKILL,
    signal.SIGTERM,
    signal.SIGKILL,
    signal.SIGINT,
    signal.SIGKILL,
    signal.SIGHUP,
)
ANSWER_SECONDS = 60.0
INTERRUPTED = 130


@dataclass(frozen=True)
class Job:
    """A command that writes, and what it leaves."""

    name: str
    words: Callable[[Path], list[str]]
    """From an empty folder to the command; it writes in there."""
    leaves: Callable[[Path], dict[str, Any]]
    """From the folder to everything that two runs must have in common; a file that is not whole
    raises."""
    share: int
    """How many of a hundred kills it gets."""
    inputs: tuple[str, ...] = ()
    """Finished folders that it reads, which must stay as they are."""


def jobs(toys: Toys) -> list[Job]:
    """Return every command that writes."""
    classifier, root = str(toys.root / "classifier"), toys.root
    lines = str(root / "data" / "lines.txt")
    return [
        Job("train", lambda out: toys.train(out / "run"), lambda out: run_leaves(out / "run"), 30),
        Job(
            "train with a worker process",
            lambda out: toys.train(out / "run", "--num-workers", "1"),
            lambda out: run_leaves(out / "run"),
            8,
        ),
        Job("compare", lambda out: toys.compare(out / "all"), partial(_compare_leaves, toys), 16),
        Job(
            "reproduce", lambda out: toys.reproduce(out / "all"), lambda out: _files(out / "all"), 6
        ),
        Job(
            "measure",
            lambda out: ["measure", classifier, "--out", str(out / "m")],
            lambda out: _files(out / "m"),
            7,
            ("classifier",),
        ),
        Job(
            "certify",
            lambda out: [
                *["certify", "--examples", "3", "--attack-steps", "1", "--radii", "0,0.1", "--out"],
                str(out / "c"),
                classifier,
            ],
            lambda out: _files(out / "c"),
            7,
            ("classifier",),
        ),
        Job(
            "predict",
            lambda out: [
                "predict",
                classifier,
                "--input",
                lines,
                "--output",
                str(out / "lines.txt"),
            ],
            _files,
            6,
            ("classifier",),
        ),
        Job(
            "report",
            lambda out: ["report", str(root / "compare"), "--out", str(out / "page.html")],
            _files,
            8,
            ("compare",),
        ),
    ]


def run(toys: Toys, count: int, seed: int, only: str = "") -> Iterator[Row]:
    """Deliver ``count`` signals to living commands, each followed by the command again."""
    place = toys.root / "kills"
    for job, wanted in shared_out(toys, count, only):
        row = Row("kills", job.name, unit="signals")
        draw = random.Random(f"{seed}/{job.name}")
        whole, duration = undisturbed(job, place / "whole", toys)
        tries = 0
        while row.tried < wanted and tries < 4 * wanted:
            number = SIGNALS[tries % len(SIGNALS)]
            tries += 1
            out = place / "killed"
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir(parents=True)
            row.tried += _trial(job, out, number, draw, duration, whole, row, toys)
        yield row


def shared_out(toys: Toys, count: int, only: str) -> list[tuple[Job, int]]:
    """Return the commands that get any of ``count`` tries, and how many; what they read is made."""
    found = [
        (job, wanted)
        for job in jobs(toys)
        if chosen(job.name, only) and (wanted := round(count * job.share / 100))
    ]
    make_folders(toys, [name for job, _ in found for name in job.inputs])
    return found


def run_leaves(run: Path) -> dict[str, Any]:
    """Return everything of a finished run that may not differ between two of them, bit for bit.

    Of the checkpoints that is the last; one that was asked to stop has saved another on its way.
    """
    leaves: dict[str, Any] = {
        "rows": json_of(run / "metrics.jsonl"),
        "results": json_of(run / "result.json")["results"],
        "names": sorted(
            path.name for path in run.iterdir() if not path.name.startswith("checkpoint-")
        ),
        "final": (run / "final" / "model.safetensors").read_bytes(),
        "manifest": sorted(json_of(run / "manifest.json")["files"]),
    }
    last = max(run.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    leaves[last.name] = [path.read_bytes() for path in sorted(last.glob("*.safetensors"))]
    return leaves


def check_names(folder: Path) -> list[str]:
    """Return the files with a good name whose content is not whole JSON."""
    broken = []
    for path in folder.rglob("*.json"):
        if not any(part.startswith(".") for part in path.relative_to(folder).parts):
            try:
                json.loads(path.read_bytes())
            except ValueError:
                broken.append(str(path.relative_to(folder)))
    return broken


def _compare_leaves(toys: Toys, out: Path) -> dict[str, Any]:
    del toys
    leaves = {
        str(path.parent.relative_to(out)): run_leaves(path.parent)
        for path in sorted(out.rglob("config.toml"))
    }
    return {
        **leaves,
        "order": json_of(out / "all" / "compare.json"),
        "page": (out / "all" / "report.html").is_file(),
    }


def _files(out: Path) -> dict[str, Any]:
    """Return every file with a good name; of JSON without its times."""
    found: dict[str, Any] = {}
    for path in sorted(out.rglob("*")):
        if path.is_file() and not path.name.startswith(".tmp-"):
            found[path.name] = (
                timeless(json.loads(path.read_bytes()))
                if path.suffix == ".json"
                else path.read_bytes()
            )
    return found


def undisturbed(job: Job, out: Path, toys: Toys) -> tuple[dict[str, Any], float]:
    """Return what a command leaves that nobody disturbs, and the seconds it takes once everything
    is imported."""
    seconds = 0.0
    for _ in range(2):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        began = time.monotonic()
        make(job.words(out), toys.root / "make.log")
        seconds = time.monotonic() - began
    return job.leaves(out), seconds


def _trial(
    job: Job,
    out: Path,
    number: signal.Signals,
    draw: random.Random,
    duration: float,
    whole: dict[str, Any],
    row: Row,
    toys: Toys,
) -> int:
    """Signal one command, sometimes twice, and finish it; return how many signals met it alive."""
    met, moments = 0, []
    log = toys.root / "kills.log"
    for _ in range(draw.choice((1, 1, 2))):
        log.unlink(missing_ok=True)
        child = start_command(job.words(out), log)
        moments.append(round(draw.uniform(0.0, duration), 3))
        time.sleep(moments[-1])
        os.kill(child, number)
        status = wait(child, ANSWER_SECONDS)
        case = f"{job.name}: {number.name} after {moments} s"
        met += status != 0
        said = log.read_text(errors="replace")
        if status is None:
            row.add(Fault("hung", case, f"no end within {ANSWER_SECONDS:g} s"))
        elif "Traceback" in said:
            row.add(Fault("foreign", case, said[-600:]))
        elif status not in (0, INTERRUPTED, -number):
            row.add(Fault("foreign", case, f"exit status {status}: {said[-400:]}"))
        if left := orphans(child):
            row.add(Fault("orphan", case, f"{len(left)} processes"))
        if broken := check_names(out):
            row.add(Fault("wrong", case, f"not whole: {', '.join(broken)}"))
        row.add(*_half_written(job, out, whole, case))
    log.unlink(missing_ok=True)
    status = wait(start_command(job.words(out), log), 300)
    if status != 0:
        row.add(
            Fault("lost", case, f"the next start: exit status {status}: {log.read_text()[-600:]}")
        )
    else:
        row.add(*difference(job, out, whole, case))
    for name in job.inputs:
        if check_names(toys.root / name):
            row.add(Fault("lost", case, f"{name} was changed"))
    return met


def _half_written(job: Job, out: Path, whole: dict[str, Any], case: str) -> list[Fault]:
    """Look for files that are neither absent nor whole, where a command writes whole files
    alone."""
    if job.leaves is not _files and job.name not in ("measure", "certify", "reproduce"):
        return []
    try:
        found = job.leaves(out)
    except ValueError:
        return []  # `check_names` says so
    half = [name for name, content in found.items() if content != whole.get(name)]
    return [Fault("wrong", case, f"half written: {', '.join(half)}")] if half else []


def difference(job: Job, out: Path, whole: dict[str, Any], case: str) -> list[Fault]:
    try:
        found = job.leaves(out)
    except (OSError, ValueError, KeyError) as error:
        return [Fault("lost", case, f"{type(error).__name__}: {error}")]
    different = [name for name in {**whole, **found} if whole.get(name) != found.get(name)]
    return (
        [Fault("wrong", case, f"different from undisturbed: {', '.join(different)}")]
        if different
        else []
    )
