"""Do the tests notice a change? Change the packages one place at a time; run the tests of that place.

    python -m tools.mutants --sample 400 --seed 0

A change that a test notices, or that makes it hang, is killed. What survives shows a missing test,
code that carries nothing, or a change that changes nothing. Every package gives as many; the same
seed draws the same sample.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import math
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.machinery import SourceFileLoader
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tools.faults.harness import fork
from tools.mutants.changes import Mutant, mutants

ROOT = Path(__file__).resolve().parents[2]
PRELOADED = (
    "torch._dynamo",
    "transformers.modeling_utils",
    "scipy.stats",
    "datasets",
    "hypothesis",
)
"""Imported once, not by each child; none of these imports a changed module."""
PACKAGES = ("linalg", "functional", "attack", "certification", "constrain")
CONTROL_EVERY = 25
FILE_SECONDS = 600.0
MEMORY_BYTES = 16 << 30
PATIENCE = 10  # a child that sleeps ends after this many times its processor time
QUIET = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--hypothesis-seed=0"]
QUIET += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # the parent imported the plugins
Tests = dict[str, dict[str, Any]]


class LineRecorder:
    """A pytest plugin that notes the lines below a folder which each passing test runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = f"{folder}/"
        self.tests: Tests = {}

    def trace(self, frame: Any, _event: str, _argument: object) -> Any:
        code = frame.f_code
        # Bodies of modules and classes run at import, in whichever test comes first.
        if not code.co_flags & inspect.CO_OPTIMIZED or not code.co_filename.startswith(self.folder):
            return None
        self.lines.setdefault(code.co_filename, set()).add(frame.f_lineno)
        return self.trace

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.lines, self.failed = dict[str, set[int]](), False
        start = time.process_time()
        sys.settrace(self.trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            if not self.failed:
                name = f"{item.path}::{item.nodeid.partition('::')[2]}"
                lines = {file: sorted(numbers) for file, numbers in self.lines.items()}
                self.tests[name] = {"seconds": time.process_time() - start, "lines": lines}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or report.outcome != "passed"


def recorded(job: tuple[Path, Path]) -> Tests:
    """Run one test file and return what its tests run."""
    folder, file = job
    recorder = LineRecorder(folder)
    pytest.main([*QUIET, "-m", "not slow", str(file)], plugins=[recorder])
    return recorder.tests


def attempt(trial: tuple[Mutant | None, list[str]]) -> str:
    """Run tests, most promising first, on a changed module; return the first that fails."""
    mutant, tests = trial
    if mutant is not None:
        code = compile(mutant.apply(), str(mutant.file), "exec")
        usual = SourceFileLoader.get_code
        SourceFileLoader.get_code = lambda self, name: (
            code if name == mutant.module else usual(self, name)
        )
    by_file: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        by_file[test.partition("::")[0]].append(test)
    return next((file for file, some in by_file.items() if pytest.main([*QUIET, "-x", *some])), "")


def in_child(work: Callable[[Any], Any], job: Any, allowed: float, answer: Path) -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (int(allowed), int(allowed) + 5))
    answer.write_text(json.dumps(work(job)))
    return 0


def forked(
    work: Callable[[Any], Any], jobs: Iterable[tuple[Any, float]], workers: int
) -> Iterator[tuple[Any, Any]]:
    """Yield (job, what `work` returned) for (job, seconds of processor time), as they end.

    The answer of a child that outlives its time or dies is None.
    """
    waiting, running, numbers = iter(jobs), {}, count()
    with tempfile.TemporaryDirectory() as folder:
        while True:
            while len(running) < workers and (job := next(waiting, None)) is not None:
                answer = Path(folder, str(next(numbers)))
                child = fork(partial(in_child, work, *job, answer), Path(os.devnull), MEMORY_BYTES)
                running[child] = (job[0], answer, time.monotonic() + PATIENCE * job[1])
            if not running:
                return
            time.sleep(0.02)
            for child, (job, answer, end) in list(running.items()):
                ended, status = os.waitpid(child, os.WNOHANG)
                if not ended and time.monotonic() < end:
                    continue
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                if not ended:
                    os.waitpid(child, 0)
                del running[child]
                yield job, json.loads(answer.read_text()) if ended and status == 0 else None


def lines_of_tests(source: Path, tests: Sequence[Path], workers: int) -> Tests:
    """Return which test runs which lines, and how long."""
    with contextlib.suppress(ImportError):
        for name in PRELOADED:
            importlib.import_module(name)
    mapped: Tests = {}
    jobs = [((source, file), FILE_SECONDS) for file in tests]
    for (_, file), answer in forked(recorded, jobs, workers):
        mapped |= answer or {}
        sys.stderr.write(f"mapped {file}: {len(answer or {})} tests\n")
    return mapped


def chosen_tests(mutant: Mutant, mapped: Tests, budget: float) -> list[str]:
    """Return the tests that run the mutant's lines, quickest first, within ``budget`` seconds."""
    (first, last), file = mutant.lines, str(mutant.file)
    covering = [
        (test["seconds"], name)
        for name, test in mapped.items()
        if any(first <= line <= last for line in test["lines"].get(file, ()))
    ]
    chosen: list[str] = []
    for seconds, name in sorted(covering):
        if chosen and seconds > budget:
            break
        budget -= seconds
        chosen.append(name)
    return chosen


def drawn(listed: Mapping[str, Sequence[Mutant]], sample: int, seed: int) -> list[Mutant]:
    """Return as many mutants of each package, or all if it has fewer, in random order."""
    share = math.ceil(sample / len(listed))
    chosen = [
        mutant
        for package, group in listed.items()
        for mutant in random.Random(f"{seed} {package}").sample(group, min(share, len(group)))
    ]
    random.Random(seed).shuffle(chosen)
    return chosen


def table(listed: Mapping[str, Sequence[Mutant]], survived: Mapping[Mutant, bool]) -> str:
    """Return the table of packages, as Markdown."""
    rows = ["| package | possible | tried | killed | survived | share killed |", "|---" * 6 + "|"]
    total = [mutant for group in listed.values() for mutant in group]
    for name, group in {**listed, "all": total}.items():
        alive = [survived[mutant] for mutant in group if mutant in survived]
        tried, killed = len(alive), alive.count(False)
        part = killed / max(tried, 1)
        share = f"{100 * part:.1f} % ± {100 * math.sqrt(part * (1 - part) / max(tried, 1)):.1f}"
        cells = (name, len(group), tried, killed, tried - killed, share)
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the sample and write the table; return 1 if an unchanged control fails its tests."""
    parser = argparse.ArgumentParser(
        "python -m tools.mutants",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    folder = {"type": lambda word: Path(word).resolve()}
    parser.add_argument("--source", default=ROOT / "src", help="where the packages lie", **folder)
    packages = [f"wellposed.{name}" for name in PACKAGES]
    parser.add_argument("--packages", nargs="+", default=packages, help="packages or modules")
    tests_of = [ROOT / "tests" / name for name in PACKAGES]
    parser.add_argument("--tests", nargs="+", default=tests_of, help="their test folders", **folder)
    parser.add_argument("--sample", type=int, default=400, help="how many changes in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of tests for a change")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args(arguments)

    source: Path = options.source
    files: dict[str, list[Path]] = {}
    for name in options.packages:
        package = source / name.replace(".", "/")
        files[name] = sorted(package.rglob("*.py")) or [package.with_suffix(".py")]
    listed = {
        name: [m for file in some for m in mutants(file, source)] for name, some in files.items()
    }
    tests = [file for folder in options.tests for file in sorted(folder.rglob("test_*.py"))]
    sources = [file for some in files.values() for file in some]
    tests += [file for file in sources if ">>>" in file.read_text(encoding="utf-8")]
    sys.path.insert(0, str(source))
    os.environ["PYTHONPATH"] = str(source)
    mapped = lines_of_tests(source, tests, options.workers)

    plan = {
        mutant: chosen_tests(mutant, mapped, options.budget)
        for mutant in drawn(listed, options.sample, options.seed)
    }
    trials = [(None, some) for some in list(plan.values())[::CONTROL_EVERY]] + list(plan.items())
    seconds = [30 + 4 * sum(mapped[name]["seconds"] for name in some) for _, some in trials]
    survived: dict[Mutant, bool] = {}
    controls: list[str | None] = []
    for (mutant, _), answer in forked(attempt, zip(trials, seconds, strict=True), options.workers):
        if mutant is None:
            controls.append(answer)
            continue
        survived[mutant] = answer == ""
        verdict = "survived" if answer == "" else f"killed by {answer or 'no answer'}"
        sys.stderr.write(f"{mutant.describe(source)}: {verdict}\n")
    sys.stdout.write(f"{table(listed, survived)}\n\n")
    for mutant in (mutant for group in listed.values() for mutant in group):
        if survived.get(mutant):
            sys.stdout.write(f"- {mutant.describe(source)} ({len(plan[mutant])} tests)\n")
    passed = controls.count("")
    sys.stdout.write(f"\n{passed} of {len(controls)} unchanged controls passed\n")
    return int(passed < len(controls))


if __name__ == "__main__":
    raise SystemExit(main())
