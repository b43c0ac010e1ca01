"""Do the tests notice a change? Changes the packages one place at a time and runs the tests that
run that place.

    python -m tools.mutants --sample 400 --seed 0

A change that a test notices, or that makes it hang, is killed. What survives shows a missing test,
code that carries nothing, or a change that changes nothing. Every package gives as many; the same
seed draws the same sample.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.mutants.changes import Mutant, mutants
from tools.mutants.children import forked
from tools.mutants.coverage_map import coverage_map
from tools.mutants.trial import Trial, attempt, planned

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("linalg", "functional", "certification", "constrain")
CONTROL_EVERY = 25


def words(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument(
        "--source", type=Path, default=ROOT / "src", help="the folder that holds the packages"
    )
    parser.add_argument("--packages", nargs="+", default=[f"wellposed.{name}" for name in PACKAGES])
    parser.add_argument(
        "--tests",
        nargs="+",
        type=Path,
        help="folders of test files, beside the packages' docstrings",
    )
    parser.add_argument("--sample", type=int, default=400, help="how many changes in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--budget", type=float, default=30.0, help="seconds of tests against one change"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="start no trial after these; the table says"
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--kept",
        type=Path,
        default=ROOT / "build" / "mutants" / "map.json",
        help="the map of lines to tests",
    )
    parser.add_argument("--only", default="", help="only changes of files whose path holds this")
    chosen = parser.parse_args(arguments)
    chosen.source = chosen.source.resolve()
    chosen.tests = [
        path.resolve() for path in chosen.tests or [ROOT / "tests" / name for name in PACKAGES]
    ]
    return chosen


def module_name(source: Path, file: Path) -> str:
    return ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__")


def drawn(listed: Mapping[str, Sequence[Mutant]], sample: int, seed: int) -> list[Mutant]:
    """Return as many mutants of each package, or all where it has fewer; any first part of them is
    a fair sample."""
    share = math.ceil(sample / len(listed))
    chosen: list[Mutant] = []
    for package, found in listed.items():
        picked = random.Random(f"{seed} {package}").sample(
            range(len(found)), min(share, len(found))
        )
        chosen += [found[position] for position in picked]
    random.Random(seed).shuffle(chosen)
    return chosen


def share(killed: int, tried: int) -> str:
    """Return a share in per cent and its standard error."""
    part = killed / tried if tried else math.nan
    return f"{100 * part:.1f} % ± {100 * math.sqrt(part * (1 - part) / max(tried, 1)):.1f}"


def table(listed: Mapping[str, Sequence[Mutant]], survived: Mapping[Mutant, bool]) -> str:
    """Return the table of packages, as Markdown."""
    rows = [
        "| package | possible | tried | killed | survived | share killed |",
        "|---|---|---|---|---|---|",
    ]
    groups = {**listed, "all": [mutant for found in listed.values() for mutant in found]}
    for name, found in groups.items():
        tried = [mutant for mutant in found if mutant in survived]
        alive = sum(survived[mutant] for mutant in tried)
        killed = len(tried) - alive
        rows.append(
            f"| {name} | {len(found)} | {len(tried)} | {killed} | {alive} |"
            f" {share(killed, len(tried))} |"
        )
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the sample and write the table; the exit status is 1 where an unchanged control fails its
    tests."""
    chosen = words(arguments)
    start = time.monotonic()
    listed: dict[str, list[Mutant]] = {}
    for package in chosen.packages:
        files = sorted((chosen.source / package.replace(".", "/")).rglob("*.py"))
        listed[package] = [
            mutant
            for file in files
            for mutant in mutants(file, module_name(chosen.source, file))
            if chosen.only in str(file)
        ]
    folders = [chosen.source / package.replace(".", "/") for package in chosen.packages]
    sources = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    tests = [file for folder in chosen.tests for file in sorted(folder.rglob("test_*.py"))]
    examples = [file for file in sources if ">>>" in file.read_text(encoding="utf-8")]
    sys.path.insert(0, str(chosen.source))
    os.environ["PYTHONPATH"] = str(chosen.source)
    mapped = coverage_map(chosen.source, sources, [*tests, *examples], chosen.kept, chosen.workers)

    trials = [
        planned(mutant, mapped, chosen.budget)
        for mutant in drawn(listed, chosen.sample, chosen.seed)
    ]
    controls = [
        Trial(t.mutant, t.groups, t.seconds, is_control=True) for t in trials[::CONTROL_EVERY]
    ]
    jobs = [(trial, 30.0 + 4 * trial.seconds) for trial in [*controls, *trials]]
    survived: dict[Mutant, bool] = {}
    broken = 0
    end = time.monotonic() + 60 * chosen.minutes
    in_time = itertools.takewhile(lambda _: time.monotonic() < end, jobs)
    for trial, answer, seconds in forked(attempt, in_time, chosen.workers):
        if trial.is_control:
            broken += answer != ""
            continue
        survived[trial.mutant] = answer == ""
        verdict = (
            "survived" if answer == "" else f"killed by {answer}" if answer else "killed: no answer"
        )
        sys.stderr.write(f"{describe(trial, chosen.source)}: {verdict} ({seconds:.1f} s)\n")
    sys.stdout.write(f"{table(listed, survived)}\n\n")
    for trial in sorted(trials, key=lambda trial: (trial.mutant.file, trial.mutant.number)):
        if survived.get(trial.mutant):
            sys.stdout.write(
                f"- {describe(trial, chosen.source)} ({sum(map(len, trial.groups))} tests)\n"
            )
    minutes = (time.monotonic() - start) / 60
    passed = len(controls) - broken
    sys.stdout.write(
        f"\n{passed} of {len(controls)} unchanged controls passed; {minutes:.1f} minutes\n"
    )
    return int(bool(broken))


def describe(trial: Trial, source: Path) -> str:
    mutant = trial.mutant
    return f"{mutant.file.relative_to(source)}:{mutant.line} `{mutant.before}` -> `{mutant.after}`"


if __name__ == "__main__":
    raise SystemExit(main())
