"""The rows of a run (``metrics.jsonl``, cut back on resume) and its outcome (``result.json``)."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from wellposed.errors import CheckpointError
from wellposed.finite_json import from_json, to_json
from wellposed.safe_read import read_bytes
from wellposed_lab.tasks.data.splits import SPLITS
from wellposed_lab.tasks.task import Task
from wellposed_lab.training.config import RunConfig
from wellposed_lab.training.folder import atomic, manifest
from wellposed_lab.training.folder.state import Evaluation, TrainerState

METRICS = "metrics.jsonl"
RESULT = "result.json"
_RESTORE = "restore the file, or train in another folder"
SCHEMA_VERSION = 1
Status = Literal["success", "cancelled", "failed"]
EXIT_CODES: dict[Status, int] = {"success": 0, "failed": 1, "cancelled": 130}


@dataclass(frozen=True)
class RunResult:
    """How a run ended (success | cancelled | failed), its folder, ``result.json`` and a message.

    >>> RunResult(status="cancelled", out=Path("runs/a")).exit_code
    130
    """

    status: Status
    out: Path
    result: dict[str, Any] = field(default_factory=dict)
    message: str = ""

    @property
    def exit_code(self) -> int:
        """The exit status of a command: 0 success, 1 failed, 130 cancelled."""
        return EXIT_CODES[self.status]


def result_schema() -> dict[str, Any]:
    """Return the JSON schema of ``result.json``."""
    return json.loads((files("wellposed_lab.training") / "result.schema.json").read_bytes())


def read_result(run_folder: Path) -> RunResult | None:
    """Return ``result.json``, or None before a run ends; other formats are a `CheckpointError`."""
    path = run_folder / RESULT
    if not path.is_file():
        return None

    manifest.verify_run_file(path)
    try:
        values = from_json(path.read_bytes())
        info = values["train_info"]
        metrics = values["results"][values["task"]]
        is_readable = info["status"] in EXIT_CODES and values["config"]["train"]["steps"] >= 0
        if not is_readable or not all(
            isinstance(item, int | float | None) for item in metrics.values()
        ):
            raise TypeError("a value of another type")
        return RunResult(info["status"], run_folder, values, str(info.get("reason", "")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{path}: not a result of wellposed ({error})"
        raise CheckpointError(f"{problem}; remove it and resume the run") from error


def describe_result(
    status: Status,
    config: RunConfig,
    task: Task,
    state: TrainerState,
    environment: Mapping[str, Any],
    *,
    evaluations: Mapping[str, Evaluation] = MappingProxyType({}),
    message: str = "",
    failure: Mapping[str, Any] | None = None,
    train_info: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the content of ``result.json``; keys shared with lm-eval have its names."""
    results: dict[str, float] = {}
    for split, item in evaluations.items():
        results |= {f"{metric},{split}": value for metric, value in item.metrics.items()}

    metrics = {task.headline, "loss"}.union(*(item.metrics for item in evaluations.values()))
    # A report shows the score of generated text first, if there is one, else the headline.
    headline = task.report_headline if task.report_headline in metrics else task.headline
    falling = {"loss"}
    if not task.higher_is_better:  # scores of generated text always rise
        falling |= {task.headline} if task.report_headline else metrics

    values: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "task": config.task,
        "variant": config.variant,
        "seed": config.train.seed,
        "results": {config.task: results},
        "headline": headline,
        "higher_is_better": {name: name not in falling for name in sorted(metrics)},
        "reference": task.reference(),
        "train_reference": {
            f"{metric},{split}": value
            for split in SPLITS[1:]
            for metric, value in task.train_reference(split).items()
        },
        "n-samples": {config.task: {name: item.examples for name, item in evaluations.items()}},
        "config": config.to_dict(),
        "train_info": {
            "status": status,
            "steps": state.step,
            "best_step": state.best_step,
            "seconds": state.seconds,
            "tokens": state.tokens,
            "tokens_per_second": state.tokens / (state.train_seconds or math.inf) or None,
            "parameters": 0,
            "peak_memory_bytes": peak_memory_bytes(),
            **train_info,
        },
        "data": task.description(),
        "git_hash": environment["git_hash"],
        "command": environment["command"],
        "versions": environment["packages"],
        "date": now(),
    }
    for evaluation in evaluations.values():
        values |= evaluation.notes

    if message:
        values["train_info"]["reason"] = message
    if failure is not None:
        values["failure"] = dict(failure)
    return values


def now() -> str:
    """Return the present time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def peak_memory_bytes() -> int:
    """Return the peak memory of this process so far: of the GPU if there is one, else resident."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


class MetricsFile:
    """The rows of a run. Opening with ``rows=n`` cuts all rows after the first n, and half a line.
    Only one process of a run writes; the others (``enabled=False``) only count rows."""

    def __init__(self, run_folder: Path, *, rows: int = 0, enabled: bool = True) -> None:
        self.path = run_folder / METRICS
        self.rows = _truncate(self.path, rows) if enabled else rows
        self._file = self.path.open("ab") if enabled else None

    def append(self, row: dict[str, Any]) -> None:
        """Add one row, visible to readers at once."""
        if self._file is not None:
            self._file.write(to_json(row))
            self._file.flush()
        self.rows += 1

    def sync(self) -> int:
        """Wait until every row is on the disk and return their number, for a checkpoint."""
        if self._file is not None:
            os.fsync(self._file.fileno())
        return self.rows

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _truncate(path: Path, rows: int) -> int:
    lines = _complete_lines(path)[:rows]
    if len(lines) < rows:
        problem = f"{len(lines)} complete rows, but the checkpoint was written after {rows}"
        raise CheckpointError(f"{path}: {problem}; {_RESTORE}")
    if path.exists() or path.is_symlink():
        atomic.replace_file(path, b"".join(lines))
    return len(lines)


def _complete_lines(path: Path) -> list[bytes]:
    if not path.exists():
        return []
    return [line for line in read_bytes(path).splitlines(keepends=True) if line.endswith(b"\n")]
