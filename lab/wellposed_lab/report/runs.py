"""Run folders and their files: which runs count and why; all damage is reported in one error."""

from __future__ import annotations

import json
import math
import os
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from wellposed.errors import CheckpointError, DataError, listed
from wellposed.finite_json import from_json
from wellposed.measurement import Measurement
from wellposed.options import fits, misfits
from wellposed.safe_read import read_bytes, read_text
from wellposed.text_table import format_number
from wellposed_lab.statistics import Failure
from wellposed_lab.training.certified import record
from wellposed_lab.training.folder.manifest import verify_run_file

Found = TypeVar("Found")
ENTRIES: Mapping[str, Any] = {
    **dict.fromkeys(("task", "variant", "headline", "date"), str),
    **dict.fromkeys(("results", "higher_is_better", "config", "train_info"), dict),
    **dict.fromkeys(("reference", "train_reference", "data", "versions"), dict | None),
    "seed": int,
    "command": list | None,
}
"""Type of each entry of ``result.json``."""
_NUMBER = (int, float, type(None))
INITIAL = "measure-initial.json"
FINAL = "measure-final.json"
ORDER_FILE = "compare.json"
"""File of a comparison: the order of its variants, and how their learning rates were chosen."""
TUNED = "rates"
"""Folder beside it with the runs that chose the rates; these are not runs of the comparison."""


@dataclass(frozen=True)
class Run:
    """One run: its ``result.json`` and, after `load_details`, its other files."""

    folder: Path
    result: Mapping[str, Any]
    """Without a ``result.json``: task, variant, seed and configuration, from ``config.toml``."""
    failure: Failure | None = None
    """Why it has no number; ``None`` if it finished."""
    reason: str = ""
    """The full reason."""
    certified: record.CertifiedRun | None = None
    """Certified accuracy of its model, if measured."""
    words: record.CertifiedWords | None = None
    """Certified accuracy under replaced words, if measured."""
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
        """Name of the variant; characters that are not UTF-8 are escaped."""
        return str(self.result["variant"]).encode(errors="backslashreplace").decode()

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
        """Finite metrics as ``{"accuracy,test": 0.41, ...}``."""
        every = self.result["results"][self.task]
        scores = {name: value for name, value in every.items() if is_finite(value)}
        for measured in (self.certified, self.words):
            scores |= {} if measured is None else measured.metrics()
        return scores

    @property
    def command(self) -> tuple[str, ...]:
        """Words of the command that made the run; empty if it was started from Python."""
        return tuple(str(word) for word in self.result.get("command") or ())


@dataclass(frozen=True)
class ExcludedRun:
    """A run that enters no mean: failed, cancelled, unfinished, or a repetition."""

    folder: Path
    task: str
    variant: str
    seed: str
    status: str
    reason: str

    @classmethod
    def from_run(cls, run: Run, status: str, reason: str) -> ExcludedRun:
        """Return the entry of ``run``."""
        return cls(run.folder, run.task, run.variant, str(run.seed), status, reason)


@dataclass(frozen=True)
class FoundRuns:
    """Runs in the order of their variants, including failed ones, and the excluded runs."""

    runs: tuple[Run, ...]
    excluded: tuple[ExcludedRun, ...]


def find_runs(paths: Sequence[Path], *, needed: bool = True) -> FoundRuns:
    """Read ``result.json`` of every run folder among or below ``paths``.

    A run folder has ``result.json`` or ``config.toml``. Variants are in the order of the
    ``compare.json`` above them, else of the given folders, else of their dates.

    Raises:
        DataError: a missing path, no run although one is ``needed``, or a damaged ``result.json``.
    """
    problems = Problems()
    folders = _run_folders([Path(path) for path in paths], problems.lines)
    entries = [problems.tried(_read_run, folder) for folder in folders]
    problems.refuse("runs cannot be read")
    runs = [entry for entry in entries if isinstance(entry, Run)]
    excluded = [
        ExcludedRun.from_run(run, run.failure.status, run.reason) for run in runs if run.failure
    ]
    excluded += [entry for entry in entries if isinstance(entry, ExcludedRun)]
    if needed and not entries:
        places = ", ".join(str(path) for path in paths) or "nothing"
        raise DataError(
            f"no run folder (with result.json or config.toml) in {places}; give the --out of a"
            " training"
        )
    newest, repeated = _without_repetitions(_in_order(runs, paths))

    return FoundRuns(tuple(newest), (*excluded, *repeated))


def load_details(runs: Iterable[Run]) -> list[Run]:
    """Return the runs with metrics, measurements and environment read.

    Raises:
        DataError: missing or damaged files, all named (with the line of metrics.jsonl).
    """
    problems = Problems()
    loaded = [
        replace(
            run,
            metrics=problems.tried(read_metrics, run.folder) or (),
            initial=problems.tried(_read_measurement, run.folder, INITIAL),
            final=problems.tried(_read_measurement, run.folder, FINAL),
            environment=problems.tried(_read_environment, run.folder / "env.json") or {},
        )
        for run in runs
    ]
    problems.refuse(
        "finished runs lack files a report needs",
        "\ntrain these runs again, or leave them out of the report",
    )

    return loaded


def first_alarm(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the first alarm of the vital signs in the rows of a run, or an empty text."""
    alarms = [row for row in rows if row["split"] == "alarm"]
    if not alarms:
        return ""
    name = next(name for name in alarms[0] if "/" in name)
    text = f"alarms at {len(alarms)} steps, the first at step {alarms[0]['step']}"
    if name.endswith("/finite"):
        module = name.removeprefix("vital/").removesuffix("/finite")
        return f"{text}: {module} is not finite"
    return f"{text}: {name} is {format_number(alarms[0][name])}"


class Problems:
    """Collects errors while files are read; ``lines`` has one for each bad file."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def tried(self, read: Callable[..., Found], *where: Any) -> Found | None:
        """Return the file's content, or record the error and return None."""
        try:
            return read(*where)
        except (CheckpointError, DataError) as error:
            self.lines.append(str(error))
            return None

    def refuse(self, title: str, advice: str = "") -> None:
        """Raise one error with every problem so far, if there are any."""
        if self.lines:
            raise DataError(f"{title}:\n{listed(self.lines)}{advice}")


def is_finite(value: Any) -> bool:
    """Return whether ``value`` is a finite number."""
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def _read_json(file: Path) -> dict[str, Any]:
    verify_run_file(file)
    try:
        value = from_json(read_bytes(file), any_number=True)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise DataError(
            f"{file}: not valid JSON ({error}); the file is cut off or damaged"
        ) from None
    if not isinstance(value, dict):
        raise DataError(f"{file}: expected a JSON object, received {type(value).__name__}")
    return value


def _read_environment(file: Path) -> dict[str, Any]:
    """Return the content of ``env.json``, with ``starts`` reduced to the steps of later starts."""
    values = _read_json(file)
    try:
        steps = [str(start["from_step"]) for start in values.get("starts", ())[1:]]
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file}: starts: {error!r}; the file is damaged") from None
    return {**values, "starts": steps}


def _read_measurement(folder: Path, name: str) -> Measurement | None:
    """Return one measurement; a model without roles has none, which is no error."""
    if not any((folder / file).exists() for file in (INITIAL, FINAL)):
        return None
    verify_run_file(folder / name)
    return Measurement.from_json(folder / name)


def read_metrics(folder: Path) -> tuple[Mapping[str, Any], ...]:
    """Return the rows of ``metrics.jsonl`` of a run; if a resumed run logged a step twice, the
    later row.

    Raises:
        DataError: it cannot be read, or a line is no row (the line is named).
        CheckpointError: it was cut or altered after the run had ended.
    """
    file = folder / "metrics.jsonl"
    try:
        verify_run_file(file)
        lines = read_text(file).removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"{file}: cannot be read ({why})") from None

    rows: dict[tuple[str, int], Mapping[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if any(isinstance(row[name], (str, list, dict)) for name in row if name != "split"):
                raise TypeError("a value that is no number")
            rows[str(row["split"]), int(row["step"])] = row
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            expected = "expected a JSON object with step, split and numbers"
            raise DataError(f"{file}:{number}: {expected}, received {line[:60]!r}") from None

    return tuple(rows.values())


def _headline_values(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the headline metric of a finished run on each split."""
    values = result["results"][result["task"]]
    headline = result["headline"]
    return {name: value for name, value in values.items() if name.partition(",")[0] == headline}


def _result_problem(result: Mapping[str, Any]) -> str | None:
    """Return the problem of ``result.json`` (schema version 1), or None."""
    entries = {name: result[name] for name in ENTRIES if name in result}
    missing = [name for name in ENTRIES if name not in entries and not fits(None, ENTRIES[name])]
    if missing:
        return f"lacks {', '.join(missing)}; expected a result file of schema version 1"

    wrong = [*misfits(entries, ENTRIES)]
    metrics = None if wrong else result["results"].get(result["task"])
    values = metrics if isinstance(metrics, dict) else {}
    if not wrong:
        references = (result.get(name) or {} for name in ("reference", "train_reference"))
        numbers = [pair for table in (*references, values) for pair in table.items()]
        wrong = [(*item, "a number") for item in numbers if not isinstance(item[1], _NUMBER)]

    if wrong:
        lines = [
            f"{name} is a {type(value).__name__}, expected {wanted}"
            for name, value, wanted in wrong
        ]
        return f"{'; '.join(lines)}; the file is damaged"
    if result["train_info"].get("status") != "success":
        return None
    if not values:
        return f"results has no metrics of task {result['task']!r}"
    if not _headline_values(result):
        names = ", ".join(values)
        return f"results lacks the headline metric {result['headline']!r}; it has {names}"

    return None


def variant_order(folder: Path) -> list[str]:
    """Return the variants of a run's comparison in order, or an empty list."""
    return _comparison_of(folder)[0]


def tuned_rates(folder: Path) -> Sequence[Mapping[str, Any]]:
    """Return the result of each variant at each learning rate; empty if rates were not compared."""
    return _comparison_of(folder)[1]


def rate_notes(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each variant: its learning rate and why."""
    by_variant: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_variant.setdefault(str(row["variant"]), []).append(row)

    notes = []
    for name, mine in by_variant.items():
        [best] = [index for index, row in enumerate(mine) if row["chosen"]]
        steps = mine[best].get("steps")
        tried = f"the best of {len(mine)} on valid" + (f" after {steps} steps" if steps else "")
        note = f"{name}: learning rate {_rate_words(mine[best])}, {tried}"
        if mine[best]["loss"] is None:
            note = f"{name}: the runs at all learning rates failed"
        elif best in (0, len(mine) - 1):
            side = "largest" if best else "smallest"
            note += f", and the {side} that was tried: widen --learning-rates"
        notes.append(note)

    return notes


def _rate_words(row: Mapping[str, Any]) -> str:
    """Return the learning rate of a run, and that of the base which its variant multiplied."""
    base = row["rate"]
    used = row.get("learning_rate") or base
    times = used / base
    return f"{used:g}" if math.isclose(times, 1) else f"{used:g} ({times:g} times {base:g})"


def _comparison_of(folder: Path) -> tuple[list[str], Sequence[Mapping[str, Any]]]:
    for parent in list(folder.parents)[:2]:
        file = parent / ORDER_FILE
        if file.is_file():
            try:
                entries = from_json(file.read_bytes())
                rows = [{**row, "rate": float(row["rate"])} for row in entries.get("rates", ())]
                rate_notes(rows)
                return [str(name) for name in entries["variants"]], rows
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                raise DataError(
                    f'{file}: expected {{"variants": [...]}}; delete the file to order by date'
                ) from error
    return [], []


def _run_folders(paths: Sequence[Path], problems: list[str]) -> list[Path]:
    folders: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            what = "is a file, expected a folder" if path.exists() else "does not exist"
            problems.append(f"{path}: {what}")
        for folder, inside, files in os.walk(path):
            if {"result.json", "config.toml"} & set(files):
                inside.clear()
                folders.setdefault(Path(folder).resolve(), Path(folder))
            left_out = {TUNED} if ORDER_FILE in files else set()
            inside[:] = sorted(name for name in {*inside} - left_out if not name.startswith("."))
    return list(folders.values())


def _in_order(runs: Sequence[Run], paths: Sequence[Path]) -> list[Run]:
    """Sort by the order of the comparison, then of the given paths, then by date."""
    places = [path.resolve() for path in paths]

    def key(run: Run) -> tuple[int, int, str]:
        order = variant_order(run.folder)
        folder = run.folder.resolve()
        position = min(i for i, path in enumerate(places) if folder.is_relative_to(path))
        rank = order.index(run.variant) if run.variant in order else len(order)
        return rank, position, str(run.result["date"])

    return sorted(runs, key=key)


def _read_run(folder: Path) -> Run | ExcludedRun:
    """Return the run, or an excluded entry if nothing is known of it."""
    file = folder / "result.json"
    if not file.exists():
        return _read_unfinished(folder)

    verify_run_file(folder / "config.toml")
    result = _read_json(file)
    problem = _result_problem(result)
    if problem:
        raise DataError(f"{file}: {problem}")

    info = result["train_info"]
    date = str(result["date"])
    if info.get("status") == "success":
        values = _headline_values(result).items()
        bad = [f"{name} = {value}" for name, value in values if not is_finite(value)]
        if bad:
            reason = f"the headline metric is not a finite number: {', '.join(bad)}"
            return Run(folder, result, Failure("failed", reason), reason)
        certified = record.read_certified(folder, run_date=date)
        replaced = record.read_words(folder, run_date=date)
        return Run(folder, result, certified=certified, words=replaced)

    reason = str(info.get("reason") or f"ended after step {info.get('steps', '?')}")
    short = reason.partition("\n")[0]
    diverged = result.get("failure")
    if isinstance(diverged, dict):
        what = diverged.get("what", "not finite")
        short = f"diverged at step {diverged.get('step', '?')}: {what}"

    with suppress(DataError):
        alarm = first_alarm(read_metrics(folder))
        reason += f"; {alarm}" if alarm else ""
    return Run(folder, result, Failure(str(info.get("status")), short), reason)


def _read_unfinished(folder: Path) -> Run | ExcludedRun:
    status = "unfinished"
    reason = "no result.json: still running, or killed before it ended"
    try:
        config = tomllib.loads(read_text(folder / "config.toml"))
        identity = {"task": config["task"], "variant": config["variant"]}
        identity["seed"] = int(config["train"]["seed"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ExcludedRun(folder, "?", folder.parent.name, folder.name, status, reason)
    # Without a date it sorts last by date.
    result = {**identity, "config": config, "date": "9"}
    return Run(folder, result, Failure(status, reason), reason)


def _without_repetitions(runs: Sequence[Run]) -> tuple[list[Run], list[ExcludedRun]]:
    """Keep the newest run of each task, variant, seed and configuration; exclude other finished runs."""
    newest: dict[str, Run] = {}
    for run in runs:
        made_by = [run.task, run.variant, run.seed, run.result["config"]]
        key = json.dumps(made_by, sort_keys=True, default=str)
        newest[key] = max(newest.get(key, run), run, key=_rank)
    chosen = {id(run) for run in newest.values()}
    repeated = [run for run in runs if id(run) not in chosen and run.failure is None]
    reason = "a newer run has the same configuration"
    excluded = [ExcludedRun.from_run(run, "repeated", reason) for run in repeated]
    return [run for run in runs if id(run) in chosen], excluded


def _rank(run: Run) -> tuple[bool, str]:
    # A run that ended, well or badly, replaces one that was stopped.
    return run.failure is None or run.failure.status == "failed", str(run.result["date"])
