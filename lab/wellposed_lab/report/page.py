"""One self-contained HTML page about runs and reproductions."""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wellposed.errors import import_extra
from wellposed.options import flat_options
from wellposed_lab.report import aggregate
from wellposed_lab.report import runs as run_files
from wellposed_lab.report.comparison import Comparison, TaskComparison
from wellposed_lab.report.extra_sections import extra_sections
from wellposed_lab.report.html_table import Cell, Column, Table, csv_link
from wellposed_lab.report.runs import Run
from wellposed_lab.report.sections import by_value, task_section
from wellposed_lab.training.folder import atomic


def build_report(run_dirs: Sequence[Path], out: Path, *, worth: float | None = None) -> Path:
    """Write one self-contained HTML page, including the data of every table and figure as CSV.

    First come the answers of all tasks. Then each task has its plots, and folded below them the
    differences with 95 % intervals, the weights and all numbers. Sections of installed packages
    (`extra_sections`), excluded runs, the environment and the commands follow. The page fetches
    nothing, and its Content-Security-Policy forbids it.

    Status: the same numbers as `aggregate`; the same folders give the same bytes.

    Args:
        run_dirs: run folders, or folders that contain run folders or files of installed packages.
        out: file to write, replaced in one step if it exists.
        worth: smallest gain that is worth it (default: a hundredth of the first variant's mean).

    Raises:
        DataError: no run; a damaged ``result.json``; a finished run with missing or damaged
            metrics, measurements or environment. All files are named in one message.
        ConfigError: matplotlib or jinja2 is not installed.

    Cost: seconds, without torch. When not to use: for numbers in Python, use `aggregate`.

    >>> build_report([Path("no-such-folder")], Path("report.html"))
    Traceback (most recent call last):
    ...
    wellposed.errors.DataError: runs cannot be read:
      no-such-folder: does not exist
    """
    out = Path(out)
    extra = extra_sections(run_dirs)
    comparison = aggregate.compare_runs(run_files.find_runs(run_dirs, needed=not extra))
    finished = (run for task in comparison.tasks for group in task.runs for run in group)
    details = {run.folder: run for run in run_files.load_details(finished)}
    variants = (result.variant for task in comparison.tasks for result in task.variants)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(variants))}
    sections = []
    for number, task in enumerate(comparison.tasks, start=1):
        runs = [[details[run.folder] for run in group] for group in task.runs]
        sections.append(task_section(number, task, runs, numbers, worth))

    environment = _environment()
    records = comparison.records()
    page = environment.get_template("report.html.j2").render(
        sections=sections,
        extra=extra,
        remarks=comparison.remarks(),
        excluded=_excluded(comparison),
        results=csv_link("results", list(records[0]), records) if records else None,
        options=_options(comparison.tasks),
        environment=_environments(list(details.values())),
        commands=_commands(list(details.values())),
        runs=len(details),
        variants=len(numbers),
        dates=sorted(str(run.result["date"])[:10] for run in details.values()),
        **_assets(environment),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    # A name may not be UTF-8.
    atomic.replace_file(out, page.encode(errors="backslashreplace"))

    return out


def _environment() -> Any:
    jinja2 = import_extra("jinja2", "compare", "HTML reports")
    loader = jinja2.PackageLoader("wellposed_lab.report")
    strict = jinja2.StrictUndefined
    settings = dict.fromkeys(("autoescape", "trim_blocks", "lstrip_blocks"), True)
    return jinja2.Environment(loader=loader, undefined=strict, **settings)


def _assets(environment: Any) -> dict[str, Any]:
    """Return style and script, and the script's hash for the page's policy."""
    from markupsafe import Markup

    source = environment.loader.get_source
    style, script = (source(environment, f"report.{kind}")[0] for kind in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return {"style": Markup(style), "script": Markup(script), "script_hash": f"sha256-{digest}"}


def _excluded(comparison: Comparison) -> Table | None:
    rows = [
        {
            "run": str(run.folder), "task": run.task, "variant": run.variant, "seed": run.seed,
            "status": Cell(run.status, run.status, "bad"), "why": run.reason,
        }
        for run in comparison.excluded
    ]  # fmt: skip
    if not rows:
        return None
    columns = [Column(name, name, "wrap" if name == "why" else "text") for name in rows[0]]
    return Table("not-counted", "Runs that are not counted", columns, rows)


def _environments(runs: Sequence[Run]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return every entry of the environments; if runs differ, each value with its runs."""
    described = []
    for run in runs:
        # Time and command are listed with the commands.
        apart = ("date", "command", "starts")
        values = {name: value for name, value in run.environment.items() if name not in apart}
        values.setdefault("packages", run.result.get("versions") or {})
        described.append((f"{run.task} {run.variant} seed {run.seed}", flat_options(values)))
    return _with_owners(described)


def _options(tasks: Sequence[TaskComparison]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return every option in which tasks or variants differ, each value with who has it."""
    described = []
    apart = ("task", "variant", "train.seed")
    for task in tasks:
        for result, runs in zip(task.variants, task.runs, strict=True):
            options = flat_options(runs[0].result["config"]) if runs else {}
            values = {name: value for name, value in options.items() if name not in apart}
            described += [(f"{task.task} {result.variant}", values)] * bool(runs)
    return [(name, values) for name, values in _with_owners(described) if len(values) > 1]


def _with_owners(described: Sequence[tuple[str, Any]]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the values of every setting; if they differ, each with its owners."""
    return [
        (
            name,
            [
                (value, ", ".join(names) if len(groups) > 1 else "")
                for value, names in groups.items()
            ],
        )
        for name, groups in by_value(described).items()
    ]


def _commands(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return each command with the runs it made."""
    groups: dict[str, list[str]] = {}
    for run in runs:
        command = shlex.join(run.command) if run.command else "(started from Python)"
        made = (
            f"{run.task} {run.variant} seed {run.seed}: {run.folder}, finished {run.result['date']}"
        )
        resumed = ", ".join(run.environment.get("starts", ()))
        made += f", resumed from step {resumed}" if resumed else ""
        groups.setdefault(command, []).append(made)
    return list(groups.items())
