"""Run folders: which ones count, which ones do not and why."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wellposed.errors import DataError
from wellposed.finite_json import from_json
from wellposed.measurement import Measurement
from wellposed.regular_file import read_text
from wellposed.report._files import FINAL, INITIAL, RunFiles, headline_values, is_finite
from wellposed.statistics import Failure
from wellposed.training.certified.record import CertifiedRun

ORDER_FILE = "compare.json"


@dataclass(frozen=True)
class Run:
    """One run: its ``result.json`` and, once `load_details` has read them, its other files."""

    folder: Path
    result: Mapping[str, Any]
    """Of a run without one: task, variant, seed and configuration, from ``config.toml``."""
    failure: Failure | None = None
    """Why it has no number; ``None`` where it finished."""
    certified: CertifiedRun | None = None
    """What its model was certified for, where that was asked."""
    metrics: Sequence[Mapping[str, Any]] = ()
    initial: Measurement | None = None
    final: Measurement | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def task(self) -> str:
        """Registered name of the task."""
        return str(self.result["task"])

    @property
    def variant(self) -> str:
        """Name of the variant as it was given."""
        return str(self.result["variant"])

    @property
    def seed(self) -> int:
        """Seed of weights and data order."""
        return int(self.result["seed"])

    @property
    def headline(self) -> str:
        """Metric by which variants are compared."""
        return str(self.result["headline"])

    @property
    def values(self) -> Mapping[str, float]:
        """Metrics as ``{"accuracy,test": 0.41, ...}``; those that are not finite are left out."""
        scores = {
            name: value
            for name, value in self.result["results"][self.task].items()
            if is_finite(value)
        }
        return scores if self.certified is None else {**scores, **self.certified.metrics()}

    @property
    def command(self) -> tuple[str, ...]:
        """Words of the command that made the run; empty where it was started from Python."""
        return tuple(str(word) for word in self.result.get("command") or ())


@dataclass(frozen=True)
class ExcludedRun:
    """A run that is listed but enters no mean: it failed, was cancelled, is unfinished, or is a
    repetition."""

    folder: Path
    task: str
    variant: str
    seed: str
    status: str
    reason: str

    @classmethod
    def of(cls, run: Run, status: str, reason: str) -> ExcludedRun:
        """Return the entry of ``run``."""
        return cls(run.folder, run.task, run.variant, str(run.seed), status, reason)


@dataclass(frozen=True)
class FoundRuns:
    """Runs in the order of their variants, those that failed included, and a list of the runs that
    do not count."""

    runs: tuple[Run, ...]
    excluded: tuple[ExcludedRun, ...]


def find_runs(paths: Sequence[Path], *, needed: bool = True) -> FoundRuns:
    """Read ``result.json`` of every run folder among or below ``paths``.

    A run folder holds ``result.json`` or ``config.toml``. Variants keep the order of the
    ``compare.json`` above them, else the order in which folders are given, else that of their
    dates.

    Raises:
        DataError: a path that does not exist, no run although one is ``needed``, or a damaged
        ``result.json``.
    """
    files = RunFiles()
    folders = _run_folders([Path(path) for path in paths], files.problems)
    read = [_read_run(folder, files) for folder in folders]
    files.refuse("runs cannot be read")
    runs = [run for run, _ in read if run is not None]
    excluded = [entry for _, entry in read if entry is not None]
    if needed and not runs and not excluded:
        places = ", ".join(str(path) for path in paths) or "nothing"
        raise DataError(
            f"no run folder (with result.json or config.toml) in {places}; give the --out of a"
            " training"
        )
    kept, repeated = _without_repetitions(_in_order(runs, paths))
    return FoundRuns(tuple(kept), (*excluded, *repeated))


def load_details(runs: Iterable[Run]) -> list[Run]:
    """Return the runs with metrics, measurements and environment read.

    Raises:
        DataError: a file is missing, cut off or malformed; every one is named, with the line for
        metrics.jsonl.
    """
    files = RunFiles()
    loaded = [
        replace(
            run,
            metrics=files.metrics(run.folder / "metrics.jsonl"),
            initial=files.measurement(run.folder, INITIAL),
            final=files.measurement(run.folder, FINAL),
            environment=files.environment(run.folder / "env.json"),
        )
        for run in runs
    ]
    files.refuse(
        "finished runs lack files a report needs",
        "train these runs again, or leave them out of the report",
    )
    return loaded


def variant_order(folder: Path) -> list[str]:
    """Return the variants of the comparison a run belongs to, first variant first; empty where none
    is written."""
    for parent in list(folder.parents)[:2]:
        file = parent / ORDER_FILE
        if file.is_file():
            try:
                order = from_json(file.read_bytes())["variants"]
                if not isinstance(order, list):
                    raise TypeError
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f'{file}: expected {{"variants": [...]}}; delete the file to order by date'
                ) from error
            return [str(name) for name in order]
    return []


def _run_folders(paths: Sequence[Path], problems: list[str]) -> list[Path]:
    folders: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            problems.append(
                f"{path}: {'is a file, expected a folder' if path.exists() else 'does not exist'}"
            )
            continue
        for folder in sorted(_search(path)):
            folders.setdefault(folder.resolve(), folder)
    return list(folders.values())


def _search(path: Path) -> list[Path]:
    if (path / "result.json").exists() or (path / "config.toml").exists():
        return [path]
    children = (
        child for child in path.iterdir() if child.is_dir() and not child.name.startswith(".")
    )
    return [found for child in children if not child.is_symlink() for found in _search(child)]


def _in_order(runs: Sequence[Run], paths: Sequence[Path]) -> list[Run]:
    """Sort by the order of the comparison, then as given, then by date."""
    places = [path.resolve() for path in paths]

    def key(run: Run) -> tuple[int, int, str]:
        order = variant_order(run.folder)
        folder = run.folder.resolve()
        given = min(i for i, place in enumerate(places) if folder.is_relative_to(place))
        return (
            order.index(run.variant) if run.variant in order else len(order),
            given,
            str(run.result["date"]),
        )

    return sorted(runs, key=key)


def _read_run(folder: Path, files: RunFiles) -> tuple[Run | None, ExcludedRun | None]:
    """Return the run, and the entry that lists it where it does not count."""
    file = folder / "result.json"
    if not file.exists():
        return _read_unfinished(folder)
    result = files.result(file)
    files.is_whole(folder / "config.toml")
    if result is None:
        return None, None
    info, diverged = result["train_info"], result.get("failure")
    if info.get("status") == "success":
        bad = [
            f"{name} = {value}"
            for name, value in headline_values(result).items()
            if not is_finite(value)
        ]
        if not bad:
            return Run(folder, result, certified=files.certified(folder, result)), None
        return _without_number(
            folder,
            result,
            "failed",
            f"the headline metric is not a finite number: {', '.join(bad)}",
        )
    reason = str(info.get("reason") or f"ended after step {info.get('steps', '?')}")
    short = reason.partition("\n")[0]
    if isinstance(diverged, dict):
        short = (
            f"diverged at step {diverged.get('step', '?')}: {diverged.get('what', 'not finite')}"
        )
    return _without_number(folder, result, str(info.get("status")), reason, short)


def _read_unfinished(folder: Path) -> tuple[Run | None, ExcludedRun]:
    reason = "no result.json: still running, or killed before it ended"
    try:
        config = tomllib.loads(read_text(folder / "config.toml"))
        known = {
            "task": config["task"],
            "variant": config["variant"],
            "seed": int(config["train"]["seed"]),
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None, ExcludedRun(folder, "?", folder.parent.name, folder.name, "unfinished", reason)
    # Without a date it comes last where only dates tell which variant is the first.
    return _without_number(folder, {**known, "config": config, "date": "9"}, "unfinished", reason)


def _without_number(
    folder: Path, result: Mapping[str, Any], status: str, reason: str, short: str = ""
) -> tuple[Run, ExcludedRun]:
    run = Run(folder, result, Failure(status, short or reason))
    return run, ExcludedRun.of(run, status, reason)


def _without_repetitions(runs: Sequence[Run]) -> tuple[list[Run], list[ExcludedRun]]:
    """Keep the newest run of each task, variant, seed and configuration; list the others that
    finished."""
    newest: dict[str, Run] = {}
    for run in runs:
        key = json.dumps(
            [run.task, run.variant, run.seed, run.result["config"]], sort_keys=True, default=str
        )
        newest[key] = max(newest.get(key, run), run, key=_rank)
    kept = {id(run) for run in newest.values()}
    repeated = [run for run in runs if id(run) not in kept and run.failure is None]
    reason = "a newer run has the same configuration"
    return [run for run in runs if id(run) in kept], [
        ExcludedRun.of(run, "repeated", reason) for run in repeated
    ]


def _rank(run: Run) -> tuple[bool, str]:
    # A run that was stopped says nothing, so it yields to one that came to an end, whether good or
    # bad.
    return run.failure is None or run.failure.status == "failed", str(run.result["date"])
