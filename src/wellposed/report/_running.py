"""Runs that have not ended: how far they are, and their losses so far."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wellposed.charts import Panel, Series, lines
from wellposed.options import flat_options
from wellposed.regular_file import read_bytes
from wellposed.report._figures import Numbers
from wellposed.report._html_table import Column, Table
from wellposed.report._panels import panel_svg
from wellposed.report._runs import Run

LARGEST = 1e300
Rows = Sequence[Mapping[str, Any]]


def running_section(runs: Sequence[Run], numbers: Numbers) -> dict[str, Any] | None:
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
    panels = enumerate(_panels(logged, numbers))
    return {"table": table, "panels": [panel_svg(panel, f"running-{k}") for k, panel in panels]}


def rows_so_far(file: Path) -> list[Mapping[str, Any]]:
    """Return the whole rows of ``metrics.jsonl``; the last may be half written, as the run goes
    on."""
    try:
        text = read_bytes(file).decode("utf-8", "replace")
    except OSError:
        return []
    rows = []
    for line in text.split("\n")[:-1]:
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
        **{split: _losses(rows, split)[-1]["loss"] for split in ("train", "valid") if _losses(rows, split)},
    }  # fmt: skip


def _panels(logged: Sequence[tuple[Run, Rows]], numbers: Numbers) -> list[Panel]:
    panels: dict[str, list[Series]] = {}
    for run, rows in logged:
        for split, words in (("train", "training"), ("valid", "validation")):
            name = f"{run.variant}, seed {run.seed}"
            drawn = lines(_losses(rows, split), "step", "loss", by=lambda _, name=name: name)
            mine = panels.setdefault(f"{run.task}: {words} loss (nats)", [])
            mine += [replace(line, colour=numbers[run.variant]) for line in drawn]
    return [
        Panel(title, "step", "loss (nats)", series, legend=False)
        for title, series in panels.items()
        if series
    ]


def _losses(rows: Rows, split: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if row.get("split") == split and _is_number(row.get("loss"))]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST
