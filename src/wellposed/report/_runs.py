"""Run folders read from disk: which ones count, which ones do not and why."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wellposed.errors import CheckpointError, DataError, listed
from wellposed.measurement import Measurement
from wellposed.statistics import Failure
from wellposed.training import verify_run_file

REQUIRED = ("task", "variant", "seed", "results", "headline", "higher_is_better", "config", "train_info", "date")
TYPES: Mapping[str, type] = {
    "task": str, "variant": str, "seed": int, "results": dict, "headline": str, "higher_is_better": dict,
    "config": dict, "train_info": dict, "date": str, "reference": dict, "command": list, "data": dict,
    "versions": dict,
}  # fmt: skip
"""What each entry of ``result.json`` is; those that `REQUIRED` lacks may be null or absent."""
ORDER_FILE = "compare.json"
INITIAL, FINAL = "measure-initial.json", "measure-final.json"


@dataclass(frozen=True)
class Run:
    """One run: its ``result.json`` and, once `load_details` has read them, its other files."""

    folder: Path
    result: Mapping[str, Any]
    """Of a run without one: task, variant, seed and configuration, from ``config.toml``."""
    failure: Failure | None = None
    """Why it has no number; ``None`` where it finished."""
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
        return {name: value for name, value in self.result["results"][self.task].items() if _is_finite(value)}

    @property
    def command(self) -> tuple[str, ...]:
        """Words of the command that made the run; empty where it was started from Python."""
        return tuple(str(word) for word in self.result.get("command") or ())


@dataclass(frozen=True)
class ExcludedRun:
    """A run that is listed but enters no mean: it failed, was cancelled, is unfinished, or is a repetition."""

    folder: Path
    task: str
    variant: str
    seed: str
    status: str
    reason: str


@dataclass(frozen=True)
class FoundRuns:
    """Runs in the order of their variants, those that failed included, and a list of the runs that do not count."""

    runs: tuple[Run, ...]
    excluded: tuple[ExcludedRun, ...]


def find_runs(paths: Sequence[Path]) -> FoundRuns:
    """Read ``result.json`` of every run folder among or below ``paths``.

    A run folder holds ``result.json`` or ``config.toml``. Variants keep the order of the ``compare.json`` above them,
    else the order in which folders are given, else that of their dates.

    Raises:
        DataError: a path that does not exist, no run at all, or a damaged ``result.json``; all are named.
    """
    folders, problems = _run_folders([Path(path) for path in paths])
    runs: list[Run] = []
    excluded: list[ExcludedRun] = []
    for folder in folders:
        run, listed_as = _read_run(folder, problems)
        runs += [run] if run is not None else []
        excluded += [listed_as] if listed_as is not None else []
    if problems:
        raise DataError("runs cannot be read:\n" + listed(problems))
    if not runs and not excluded:
        places = ", ".join(str(path) for path in paths) or "nothing"
        raise DataError(f"no run folder (with result.json or config.toml) in {places}; give the --out of a training")
    kept, repeated = _without_repetitions(_in_order(runs, paths))
    return FoundRuns(tuple(kept), (*excluded, *repeated))


def load_details(runs: Iterable[Run]) -> list[Run]:
    """Return the runs with metrics, measurements and environment read.

    Raises:
        DataError: a file is missing, cut off or malformed; every one is named, with the line for metrics.jsonl.
    """
    problems: list[str] = []
    loaded = [
        replace(
            run,
            metrics=_read_metrics(run.folder / "metrics.jsonl", problems),
            initial=_read_measurement(run.folder, INITIAL, problems),
            final=_read_measurement(run.folder, FINAL, problems),
            environment=_read_environment(run.folder / "env.json", problems),
        )
        for run in runs
    ]
    if problems:
        raise DataError(
            "finished runs lack files a report needs:\n"
            + listed(problems)
            + "\ntrain these runs again, or leave them out of the report"
        )
    return loaded


def variant_order(folder: Path) -> list[str]:
    """Return the variants of the comparison a run belongs to, first variant first; empty where none is written."""
    for parent in list(folder.parents)[:2]:
        file = parent / ORDER_FILE
        if file.is_file():
            try:
                order = json.loads(file.read_text(encoding="utf-8"))["variants"]
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f'{file}: expected {{"variants": [...]}}; delete the file to order by date') from error
            return [str(name) for name in order]
    return []


def _run_folders(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    folders: dict[Path, Path] = {}
    problems = []
    for path in paths:
        if not path.is_dir():
            problems.append(f"{path}: {'is a file, expected a folder' if path.exists() else 'does not exist'}")
            continue
        for folder in sorted(_search(path)):
            folders.setdefault(folder.resolve(), folder)
    return list(folders.values()), problems


def _search(path: Path) -> list[Path]:
    if (path / "result.json").exists() or (path / "config.toml").exists():
        return [path]
    children = (child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    return [found for child in children if not child.is_symlink() for found in _search(child)]


def _in_order(runs: Sequence[Run], paths: Sequence[Path]) -> list[Run]:
    """Sort by the order of the comparison, then as given, then by date."""
    places = [path.resolve() for path in paths]

    def key(run: Run) -> tuple[int, int, str]:
        order = variant_order(run.folder)
        folder = run.folder.resolve()
        given = min(i for i, place in enumerate(places) if folder.is_relative_to(place))
        return order.index(run.variant) if run.variant in order else len(order), given, str(run.result["date"])

    return sorted(runs, key=key)


def _read_run(folder: Path, problems: list[str]) -> tuple[Run | None, ExcludedRun | None]:
    """Return the run, and the row that lists it where it does not count."""
    file = folder / "result.json"
    if not file.exists():
        return _read_unfinished(folder)
    result = _read_json(file, problems)
    _verify(folder / "config.toml", problems)
    problem = None if result is None else _result_problem(result)
    if problem:
        problems.append(f"{file}: {problem}")
    if result is None or problem:
        return None, None
    if _status(result) != "success":
        info = result["train_info"]
        reason = str(info.get("reason") or f"ended after step {info.get('steps', '?')}")
        short, diverged = reason.partition("\n")[0], result.get("failure")
        if isinstance(diverged, dict):
            short = f"diverged at step {diverged.get('step', '?')}: {diverged.get('what', 'not finite')}"
        return _failed(Run(folder, result, Failure(_status(result), short)), reason)
    values = result["results"][result["task"]]
    bad = [f"{name} = {values[name]}" for name in _headline_names(result) if not _is_finite(values[name])]
    if bad:
        reason = f"the headline metric is not a finite number: {', '.join(bad)}"
        return _failed(Run(folder, result, Failure("failed", reason)), reason)
    return Run(folder, result), None


def _read_unfinished(folder: Path) -> tuple[Run | None, ExcludedRun]:
    reason = "no result.json: still running, or killed before it ended"
    try:
        config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        known = {"task": config["task"], "variant": config["variant"], "seed": int(config["train"]["seed"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None, ExcludedRun(folder, "?", folder.parent.name, folder.name, "unfinished", reason)
    # Without a date it comes last where only dates tell which variant is the first.
    result = {**known, "config": config, "date": "9"}
    return _failed(Run(folder, result, Failure("unfinished", reason)), reason)


def _failed(run: Run, reason: str) -> tuple[Run, ExcludedRun]:
    status = run.failure.status if run.failure else ""
    return run, ExcludedRun(run.folder, run.task, run.variant, str(run.seed), status, reason)


def _headline_names(result: Mapping[str, Any]) -> list[str]:
    return [name for name in result["results"][result["task"]] if name.partition(",")[0] == result["headline"]]


def _status(result: Mapping[str, Any]) -> str:
    return str(result["train_info"].get("status"))


def _result_problem(result: Mapping[str, Any]) -> str | None:
    missing = [key for key in REQUIRED if key not in result]
    if missing:
        return f"lacks {', '.join(missing)}; expected a result file of schema version 1"
    wrong = [
        f"{key} is a {type(result[key]).__name__}, expected {kind.__name__}"
        for key, kind in TYPES.items()
        if not isinstance(result.get(key), kind) and (key in REQUIRED or result.get(key) is not None)
    ]
    if wrong:
        return f"{'; '.join(wrong)}; the file is damaged"
    if _status(result) != "success":
        return None
    values = result["results"].get(result["task"])
    if not isinstance(values, dict) or not values:
        return f"results has no metrics of task {result['task']!r}"
    if not _headline_names(result):
        return f"results lacks the headline metric {result['headline']!r}; it has {', '.join(values)}"
    return None


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _without_repetitions(runs: Sequence[Run]) -> tuple[list[Run], list[ExcludedRun]]:
    """Keep the newest of runs with the same task, variant, seed and configuration; list the others that finished.

    A run that was stopped says nothing, so it yields to one that came to an end, whether good or bad.
    """
    newest: dict[str, Run] = {}
    for run in runs:
        key = json.dumps([run.task, run.variant, run.seed, run.result["config"]], sort_keys=True, default=str)
        if key not in newest or _rank(run) > _rank(newest[key]):
            newest[key] = run
    kept = {id(run) for run in newest.values()}
    repeated = [
        ExcludedRun(
            run.folder, run.task, run.variant, str(run.seed), "repeated", "a newer run has the same configuration"
        )
        for run in runs
        if id(run) not in kept and run.failure is None
    ]
    return [run for run in runs if id(run) in kept], repeated


def _rank(run: Run) -> tuple[bool, str]:
    ended = run.failure is None or run.failure.status == "failed"
    return ended, str(run.result["date"])


def _verify(file: Path, problems: list[str]) -> bool:
    """Return whether ``file`` is what the run wrote, as far as its manifest says."""
    try:
        verify_run_file(file)
    except CheckpointError as error:
        problems.append(str(error))
        return False
    return True


def _read_json(file: Path, problems: list[str]) -> dict[str, Any] | None:
    if not _verify(file, problems):
        return None
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(f"{file}: cannot be read ({error.strerror})")
    except (ValueError, RecursionError) as error:
        problems.append(f"{file}: not valid JSON ({error}); the file is cut off or damaged")
    else:
        if isinstance(value, dict):
            return value
        problems.append(f"{file}: expected a JSON object, received {type(value).__name__}")
    return None


def _read_environment(file: Path, problems: list[str]) -> dict[str, Any]:
    values = _read_json(file, problems) or {}
    if not isinstance(values.get("starts", []), list):
        problems.append(f"{file}: starts is a {type(values['starts']).__name__}, expected list; the file is damaged")
    return values


def _read_measurement(folder: Path, name: str, problems: list[str]) -> Measurement | None:
    """Read one measurement; a model without roles leaves neither, which is no problem."""
    if not any((folder / each).exists() for each in (INITIAL, FINAL)):
        return None
    if not _verify(folder / name, problems):
        return None
    try:
        return Measurement.from_json(folder / name)
    except DataError as error:
        problems.append(str(error))
        return None


def _read_metrics(file: Path, problems: list[str]) -> tuple[Mapping[str, Any], ...]:
    if not _verify(file, problems):
        return ()
    try:
        lines = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{file}: cannot be read ({getattr(error, 'strerror', None) or error})")
        return ()
    rows: dict[tuple[str, int], Mapping[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if any(isinstance(row[name], (str, list, dict)) for name in row if name != "split"):
                raise TypeError("a value that is no number")
            # A resumed run may have logged a step twice: the later row is the one the weights went through.
            rows[str(row["split"]), int(row["step"])] = row
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            problems.append(
                f"{file}:{number}: expected a JSON object with step, split and numbers, received {line[:60]!r}"
            )
            return ()
    return tuple(rows.values())
