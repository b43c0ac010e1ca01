"""The files of run folders, read with every problem collected: damage must be named, and all of it
at once."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wellposed.errors import CheckpointError, DataError, listed
from wellposed.finite_json import from_json
from wellposed.measurement import Measurement
from wellposed.options import fits, misfits
from wellposed.regular_file import read_bytes, read_text
from wellposed.training import verify_run_file
from wellposed.training.certified.record import CertifiedRun, read_certified

ENTRIES: Mapping[str, Any] = {
    **dict.fromkeys(("task", "variant", "headline", "date"), str),
    **dict.fromkeys(("results", "higher_is_better", "config", "train_info"), dict),
    **dict.fromkeys(("reference", "data", "versions"), dict | None),
    "seed": int,
    "command": list | None,
}
"""What each entry of ``result.json`` is."""
INITIAL, FINAL = "measure-initial.json", "measure-final.json"


class RunFiles:
    """Reads files of run folders; `problems` has one line for each that is missing or not as it was
    written."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def refuse(self, title: str, advice: str = "") -> None:
        """Raise one error with every problem so far, if there are any."""
        if self.problems:
            raise DataError(
                f"{title}:\n{listed(self.problems)}" + (f"\n{advice}" if advice else "")
            )

    def is_whole(self, file: Path) -> bool:
        """Return whether ``file`` is what the run wrote, as far as its manifest says."""
        try:
            verify_run_file(file)
        except CheckpointError as error:
            self.problems.append(str(error))
            return False
        return True

    def json_object(self, file: Path) -> dict[str, Any] | None:
        """Return the content of a JSON file."""
        if not self.is_whole(file):
            return None
        try:
            value = from_json(read_bytes(file), any_number=True)
        except OSError as error:
            self.problems.append(f"{file}: cannot be read ({error.strerror})")
        except ValueError as error:
            self.problems.append(
                f"{file}: not valid JSON ({error}); the file is cut off or damaged"
            )
        else:
            if isinstance(value, dict):
                return value
            self.problems.append(f"{file}: expected a JSON object, received {type(value).__name__}")
        return None

    def result(self, file: Path) -> dict[str, Any] | None:
        """Return the content of ``result.json``, whose entries are those of schema version 1."""
        result = self.json_object(file)
        problem = None if result is None else _result_problem(result)
        if problem:
            self.problems.append(f"{file}: {problem}")
            return None
        return result

    def certified(self, folder: Path, result: Mapping[str, Any]) -> CertifiedRun | None:
        """Return the content of ``certified.json``; most runs have none, which is no problem."""
        try:
            return read_certified(folder, run_date=str(result["date"]))
        except DataError as error:
            self.problems.append(str(error))
            return None

    def environment(self, file: Path) -> dict[str, Any]:
        """Return the content of ``env.json``."""
        values = self.json_object(file) or {}
        starts = values.get("starts", [])
        if not isinstance(starts, list):
            self.problems.append(
                f"{file}: starts is a {type(starts).__name__}, expected list; the file is damaged"
            )
        return values

    def measurement(self, folder: Path, name: str) -> Measurement | None:
        """Return one measurement; a model without roles leaves neither, which is no problem."""
        if not any((folder / each).exists() for each in (INITIAL, FINAL)) or not self.is_whole(
            folder / name
        ):
            return None
        try:
            return Measurement.from_json(folder / name)
        except DataError as error:
            self.problems.append(str(error))
            return None

    def metrics(self, file: Path) -> tuple[Mapping[str, Any], ...]:
        """Return the rows of ``metrics.jsonl``; of a step that a resumed run logged twice the later
        one."""
        if not self.is_whole(file):
            return ()
        try:
            lines = read_text(file).removesuffix("\n").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            self.problems.append(
                f"{file}: cannot be read ({getattr(error, 'strerror', None) or error})"
            )
            return ()
        rows: dict[tuple[str, int], Mapping[str, Any]] = {}
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                if any(isinstance(row[name], (str, list, dict)) for name in row if name != "split"):
                    raise TypeError("a value that is no number")
                rows[str(row["split"]), int(row["step"])] = row
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                expected = "expected a JSON object with step, split and numbers"
                self.problems.append(f"{file}:{number}: {expected}, received {line[:60]!r}")
                return ()
        return tuple(rows.values())


def is_finite(value: Any) -> bool:
    """Return whether ``value`` is a finite number."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def headline_values(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the headline metric of a finished run on each split."""
    values = result["results"][result["task"]]
    return {
        name: value
        for name, value in values.items()
        if name.partition(",")[0] == result["headline"]
    }


def _result_problem(result: Mapping[str, Any]) -> str | None:
    given = {name: result[name] for name in ENTRIES if name in result}
    missing = [name for name in ENTRIES if name not in given and not fits(None, ENTRIES[name])]
    if missing:
        return f"lacks {', '.join(missing)}; expected a result file of schema version 1"
    wrong = {name: expected for name, _, expected in misfits(given, ENTRIES)}
    if not wrong:
        given = {
            f"{part}.{name}": value
            for part, entries in (
                ("reference", result.get("reference")),
                (f"results.{result['task']}", result["results"].get(result["task"])),
            )
            for name, value in (entries.items() if isinstance(entries, dict) else ())
        }
        wrong = {
            name: "a number"
            for name, value in given.items()
            if not isinstance(value, (int, float, type(None)))
        }
    if wrong:
        said = [f"{k} is a {type(given[k]).__name__}, expected {v}" for k, v in wrong.items()]
        return f"{'; '.join(said)}; the file is damaged"
    if result["train_info"].get("status") != "success":
        return None
    values = result["results"].get(result["task"])
    if not isinstance(values, dict) or not values:
        return f"results has no metrics of task {result['task']!r}"
    if not headline_values(result):
        return (
            f"results lacks the headline metric {result['headline']!r}; it has {', '.join(values)}"
        )
    return None
