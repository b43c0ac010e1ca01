"""Which test runs which line of the packages, and how long: made once a test file, kept until
something changes."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from tools.mutants.children import forked

FILE_LIMIT = 600.0
QUIET = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header"]
# The parent has imported the plugins before pytest could prepare them; their assertions are not
# ours.
QUIET += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]


class Recorder:
    """A pytest plugin that notes the lines below a folder which each passing test runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = f"{folder}/"
        self.wanted: dict[CodeType, bool] = {}
        self.lines: dict[str, set[int]] = {}
        self.failed = False
        self.tests: dict[str, dict[str, Any]] = {}

    def trace(self, frame: FrameType, _event: str, _argument: object) -> Any:
        code = frame.f_code
        wanted = self.wanted.get(code)
        if wanted is None:
            # Bodies of modules and classes run at import, in whichever test comes first.
            in_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
            wanted = self.wanted[code] = in_function and code.co_filename.startswith(self.folder)
        if not wanted:
            return None
        lines = self.lines.setdefault(code.co_filename, set())
        lines.add(frame.f_lineno)

        def line(frame: FrameType, _event: str, _argument: object) -> Any:
            lines.add(frame.f_lineno)
            return line

        return line

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.lines, self.failed = {}, False
        start = time.process_time()
        sys.settrace(self.trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            seconds = time.process_time() - start
            if not self.failed:
                lines = {file: sorted(found) for file, found in self.lines.items()}
                name = (  # no matter from where it is run again
                    f"{item.path}::{item.nodeid.partition('::')[2]}"
                )
                self.tests[name] = {"seconds": round(seconds, 4), "lines": lines}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or report.outcome != "passed"


def use_fixed_examples() -> None:
    """Let hypothesis draw the same examples each time, and no time limit decide."""
    if "hypothesis" in sys.modules:
        from hypothesis import settings

        settings.register_profile("mutants", derandomize=True, database=None, deadline=None)
        settings.load_profile("mutants")


def recorded(job: tuple[Path, Path]) -> dict[str, Any]:
    """Run one test file and return what its tests run."""
    folder, file = job
    use_fixed_examples()
    recorder = Recorder(folder)
    pytest.main([*QUIET, "-m", "not slow", str(file)], plugins=[recorder])
    return recorder.tests


def imported(tests: Sequence[Path]) -> list[str]:
    """Collect test files and return every module that this imports."""
    pytest.main([*QUIET, "--collect-only", *map(str, tests)])
    return sorted(sys.modules)


def preload(names: Iterable[str], own: frozenset[str]) -> None:
    """Import once what the children would each import: everything but what is changed or lies in
    the test folders."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            if not own.isdisjoint(name.split(".")) or name.startswith("_"):
                continue
            try:
                importlib.import_module(name)
            except Exception:
                continue
    if found := own.intersection(sys.modules):
        raise RuntimeError(f"{', '.join(found)} imported before any change: no child would see one")


def digest(files: Sequence[Path]) -> str:
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def coverage_map(
    source: Path, sources: Sequence[Path], tests: Sequence[Path], kept: Path, workers: int
) -> dict[str, dict[str, Any]]:
    """Return, for each test file, its digest and its tests; only changed files are run."""
    state = digest(sources)
    known = json.loads(kept.read_text()) if kept.exists() else {}
    if known.get("sources") != state:
        known = {"sources": state, "files": {}}
    if "modules" not in known:
        [(_, modules, _)] = forked(imported, [(tests, FILE_LIMIT)], 1)
        known["modules"] = modules or []
    own = {"conftest", *(file.relative_to(source).parts[0] for file in sources)}
    preload((name for name in known["modules"] if not name.startswith("tests.")), frozenset(own))
    files = known["files"]
    digests = {str(file): digest([file]) for file in tests}
    stale = [file for file in tests if files.get(str(file), {}).get("digest") != digests[str(file)]]
    for (_, file), answer, seconds in forked(
        recorded, [((source, file), FILE_LIMIT) for file in stale], workers
    ):
        files[str(file)] = {"digest": digests[str(file)], "tests": answer or {}}
        sys.stderr.write(f"mapped {file}: {len(answer or {})} tests in {seconds:.0f} s\n")
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(known))
    return {name: files[name] for name in digests}
