"""Runs that have not ended: how far they are, and their losses so far."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellposed.charts import Panel, Series
from wellposed.options import flat_options
from wellposed.regular_file import read_bytes
from wellposed.report._figures import Numbers
from wellposed.report._html_table import Column, Table
from wellposed.report._panels import panel_svg
from wellposed.report._runs import Run

LARGEST = 1e300
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Running:
    """A table of unfinished runs, and a panel for each task and split."""

    table: Table
    panels: Sequence[Any]


def running_section(runs: Sequence[Run], numbers: Numbers) -> Running | None:
    """Return what unfinished runs have logged; None where there is no such run."""
    if not runs:
        return None
    logged = [(run, rows_so_far(run.folder / "metrics.jsonl")) for run in runs]
    columns = [
        Column("run", "run", "text"), Column("task", "task", "text"), Column("variant", "variant", "text"),
        Column("seed", "seed"), Column("step", "step", "count"), Column("steps", "of steps", "count"),
        Column("train", "training loss (nats)"), Column("valid", "validation loss (nats)"),
    ]  # fmt: skip
    table = Table(
        "running",
        "Still running, or killed: last values logged",
        columns,
        [_row(*each) for each in logged],
    )
    return Running(
        table,
        [panel_svg(panel, f"running-{k}") for k, panel in enumerate(_panels(logged, numbers))],
    )


def rows_so_far(file: Path) -> list[Mapping[str, Any]]:
    """Return the whole rows of ``metrics.jsonl``; the last may be half written, as the run goes
    on."""
    try:
        lines = read_bytes(file).decode("utf-8", "replace").split("\n")
    except OSError:
        return []
    rows = []
    for line in lines[:-1]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        if isinstance(row, dict) and _is_number(row.get("step")):
            rows.append(row)
    return rows


def _row(run: Run, rows: Rows) -> dict[str, Any]:
    steps = flat_options(run.result["config"]).get("train.steps")
    return {
        "run": str(run.folder), "task": run.task, "variant": run.variant, "seed": run.seed,
        "step": max((row["step"] for row in rows), default=0), "steps": steps if _is_number(steps) else None,
        **{split: (_losses(rows, split)[1] or [None])[-1] for split in ("train", "valid")},
    }  # fmt: skip


def _panels(logged: Sequence[tuple[Run, Rows]], numbers: Numbers) -> list[Panel]:
    panels: dict[str, list[Series]] = {}
    for run, rows in logged:
        for split, words in (("train", "training"), ("valid", "validation")):
            steps, losses = _losses(rows, split)
            if steps:
                line = Series(
                    f"{run.variant}, seed {run.seed}", steps, losses, colour=numbers[run.variant]
                )
                panels.setdefault(f"{run.task}: {words} loss (nats)", []).append(line)
    return [
        Panel(title, "step", "loss (nats)", series, legend=False)
        for title, series in panels.items()
    ]


def _losses(rows: Rows, split: str) -> tuple[list[float], list[float]]:
    points = [
        (row["step"], row["loss"])
        for row in rows
        if row.get("split") == split and _is_number(row.get("loss"))
    ]
    return [step for step, _ in points], [loss for _, loss in points]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST
