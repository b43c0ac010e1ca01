"""One offline HTML page about finished runs, and the data of its figures as CSV beside it."""

from __future__ import annotations

import datetime
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellposed.errors import missing_extra
from wellposed.measurement import WEIGHT_COLUMNS, write_csv
from wellposed.options import flat_options
from wellposed.report._aggregate import TaskComparison, compare_runs
from wellposed.report._certified import certified_caption, certified_curves
from wellposed.report._curves import task_curves
from wellposed.report._plots import (
    certified_figure,
    curves_figure,
    mean_rows,
    orthogonality_figure,
    spectra_figure,
    weights_error,
)
from wellposed.report._runs import Run, find_runs, load_details
from wellposed.report._tables import conclusions
from wellposed.text_table import format_number


@dataclass(frozen=True)
class Figure:
    """An inline figure, the sentence under it and the file that holds its data."""

    svg: Any
    caption: str
    data: str


@dataclass(frozen=True)
class TaskSection:
    """What the template shows of one task."""

    anchor: str
    comparison: TaskComparison
    conclusions: Sequence[str]
    metrics: Sequence[str]
    figures: Sequence[Figure]
    weights: Sequence[Mapping[str, Any]]
    training: Sequence[Mapping[str, Any]]
    settings: Sequence[tuple[str, Sequence[str]]]
    data: Sequence[tuple[str, str]]


def build_report(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write one HTML page that needs no network and no script, and its figures' data as CSV in ``<stem>_data/``.

    The page holds, per task: mean ± standard error over seeds and the paired test against the first variant,
    whether each variant learned, loss curves, certified accuracy against radius where it was measured, the
    orthogonality error before and after training by layer and role, singular values, what differs between variants;
    then the runs that do not count and why, the environment and the exact commands. Status: the same numbers as
    `aggregate`. Output is deterministic except for the date.

    Args:
        run_dirs: run folders, or folders that hold run folders.
        out: file to write, replaced where it exists.

    Returns:
        ``out``.

    Raises:
        DataError: no run; a damaged ``result.json``; a finished run whose metrics, measurements or environment are
            missing or cut off. All files are named in one message.
        ConfigError: matplotlib or jinja2 is not installed.

    Cost: seconds; no torch. When not to use: to follow a run while it trains, read ``metrics.jsonl``.

    >>> build_report([Path("no-such-folder")], Path("report.html"))
    Traceback (most recent call last):
    ...
    wellposed.errors.DataError: runs cannot be read:
      no-such-folder: does not exist
    """
    out = Path(out)
    comparison = compare_runs(find_runs(run_dirs))
    details = {run.folder: run for run in load_details(r for t in comparison.tasks for g in t.runs for r in g)}
    template = _template()
    folder = out.with_name(f"{out.stem}_data")
    out.parent.mkdir(parents=True, exist_ok=True)
    comparison.to_csv(folder / "results.csv")
    sections = [
        _section(number, task, [[details[run.folder] for run in group] for group in task.runs], folder)
        for number, task in enumerate(comparison.tasks, start=1)
    ]
    runs = list(details.values())
    page = template.render(
        sections=sections,
        remarks=comparison.remarks(),
        excluded=comparison.excluded,
        results=f"{folder.name}/results.csv",
        environment=_environments(runs),
        commands=_commands(runs),
        runs=len(runs),
        date=datetime.date.today().isoformat(),
    )
    out.write_text(page, encoding="utf-8")
    return out


def _template() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise missing_extra("jinja2", "report", "HTML reports") from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("wellposed.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = format_number
    environment.filters["count"] = lambda value: "-" if value is None else f"{value:,.0f}"
    return environment.get_template("report.html.j2")


def _section(number: int, task: TaskComparison, runs: Sequence[Sequence[Run]], folder: Path) -> TaskSection:
    slug = f"{number}-{re.sub(r'[^a-z0-9_]+', '-', task.task.lower()).strip('-')}"[:40]
    weights = [
        (
            result.variant,
            mean_rows([run.initial.rows for run in group if run.initial]),
            mean_rows([run.final.rows for run in group if run.final]),
        )
        for result, group in zip(task.variants, runs, strict=True)
        if group and all(run.initial and run.final for run in group)
    ]
    measured = {variant for variant, _, _ in weights}
    unmeasured = [r.variant for r in task.variants if r.seeds and r.variant not in measured]
    notes = [f"note: {name} has no measurement, as no weight of its model has a known role" for name in unmeasured]
    return TaskSection(
        anchor=f"task-{number}",
        comparison=task,
        conclusions=[*conclusions(task), *notes],
        metrics=[name for name in task.metrics if name != task.metric],
        figures=_figures(slug, task, runs, weights, folder),
        weights=_weight_table(weights),
        training=[_training(r.variant, group) for r, group in zip(task.variants, runs, strict=True) if group],
        settings=_differences([group for group in runs if group]),
        data=_data(runs),
    )


def _figures(
    slug: str, task: TaskComparison, runs: Sequence[Sequence[Run]], weights: Sequence[Any], folder: Path
) -> list[Figure]:
    from markupsafe import Markup

    figures = []
    several = any(len(group) > 1 for group in runs)
    panels = task_curves(task, runs)
    if panels:
        rows = [row for curves in panels.values() for curve in curves for row in curve.rows()]
        file = write_csv(folder / f"{slug}-curves.csv", list(rows[0]), rows)
        order = [result.variant for result in task.variants]
        band = "Mean over seeds; the band reaches from the lowest seed to the highest." if several else "One seed."
        svg = curves_figure(panels, task.reference, order, f"{slug}-curves")
        figures.append(Figure(Markup(svg), f"Training and validation. {band}", f"{folder.name}/{file.name}"))
    certified = certified_curves(task, runs)
    if certified:
        rows = [row for curve in certified for row in curve.rows()]
        file = write_csv(folder / f"{slug}-certified.csv", list(rows[0]), rows)
        order = [result.variant for result in task.variants]
        svg = certified_figure(certified, order, f"{slug}-certified")
        figures.append(Figure(Markup(svg), certified_caption(runs), f"{folder.name}/{file.name}"))
    mean = ", mean over seeds" if several else ""
    rows = _weight_rows(weights)
    columns = ["variant", "when", *WEIGHT_COLUMNS]
    if any(row["layer"] is not None for row in rows):
        file = write_csv(folder / f"{slug}-weights.csv", columns, rows)
        caption = (
            f"Orthogonality error err_orth = {weights_error(weights).formula} (of the smaller Gram matrix) by layer "
            f"and role{mean}; 0 is orthogonal. One logarithmic colour scale for all maps."
        )
        svg = orthogonality_figure(weights, f"{slug}-orth")
        figures.append(Figure(Markup(svg), caption, f"{folder.name}/{file.name}"))
    svg = spectra_figure(weights, f"{slug}-spectra")
    if svg:
        values = [
            {**row, "index": index, "singular_value": value}
            for row in rows
            for index, value in enumerate(row.get("singular_values") or ())
        ]
        columns = ["variant", "when", "stack", "layer", "role", "path", "index", "singular_value"]
        file = write_csv(folder / f"{slug}-spectra.csv", columns, values)
        caption = (
            f"Singular values{mean}: dashed before, solid after training; "
            "colour runs from the first layer (dark) to the last."
        )
        figures.append(Figure(Markup(svg), caption, f"{folder.name}/{file.name}"))
    return figures


def _weight_rows(weights: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {"variant": variant, "when": when, **row}
        for variant, before, after in weights
        for when, rows in (("before", before), ("after", after))
        for row in rows
    ]


def _weight_table(weights: Sequence[Any]) -> list[dict[str, Any]]:
    table = []
    for variant, before, after in weights:
        initial = {(row["path"], row["role"]): row for row in before}
        for row in after:
            place = " ".join(str(part) for part in (row["stack"], row["layer"], row["role"]) if part is not None)
            start = initial.get((row["path"], row["role"]), {})
            table.append({"variant": variant, "weight": place.replace("_", " "), "before": start, "after": row})
    return table


def _training(variant: str, group: Sequence[Run]) -> dict[str, Any]:
    infos = [run.result["train_info"] for run in group]

    def mean(name: str) -> float | None:
        values = [info[name] for info in infos if isinstance(info.get(name), (int, float))]
        return sum(values) / len(values) if values else None

    names = ("steps", "best_step", "parameters", "tokens", "seconds", "tokens_per_second", "peak_memory_bytes")
    values = {name: mean(name) for name in names}
    memory = values.pop("peak_memory_bytes")
    return {"variant": variant, **values, "peak_memory_mib": memory / 2**20 if memory else None}


def _differences(runs: Sequence[Sequence[Run]]) -> list[tuple[str, Sequence[str]]]:
    """Settings in which variants differ, one value per variant."""
    configs = [flat_options(group[0].result["config"]) for group in runs]
    names = sorted({name for config in configs for name in config} - {"variant", "train.seed"})
    values = [(name, [str(config.get(name, "not set")) for config in configs]) for name in names]
    return [(name, row) for name, row in values if len(set(row)) > 1]


def _data(runs: Sequence[Sequence[Run]]) -> list[tuple[str, str]]:
    """Description of the data; a setting in which runs differ shows all its values."""
    described = [flat_options(run.result.get("data") or {}) for group in runs for run in group]
    names = list(dict.fromkeys(name for description in described for name in description))
    return [(name, " | ".join(dict.fromkeys(_shown(d.get(name, "-")) for d in described))) for name in names]


def _environments(runs: Sequence[Run]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Every entry once; where runs differ, each value with the runs it belongs to."""
    described = [(run, flat_options(_environment(run))) for run in runs]
    table = []
    for name in dict.fromkeys(name for _, values in described for name in values):
        groups: dict[str, list[Run]] = {}
        for run, values in described:
            groups.setdefault(_shown(values.get(name, "-")), []).append(run)
        table.append((name, [(value, "" if len(groups) == 1 else _names(group)) for value, group in groups.items()]))
    return table


def _names(runs: Sequence[Run]) -> str:
    return ", ".join(f"{run.task} {run.variant} seed {run.seed}" for run in runs)


def _environment(run: Run) -> dict[str, Any]:
    """What the run ran on; when and how it was started is told with the commands."""
    values = {name: value for name, value in run.environment.items() if name not in ("date", "command", "starts")}
    return values if "packages" in values else {**values, "packages": run.result.get("versions") or {}}


def _shown(value: Any) -> str:
    if value is None or value == []:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _commands(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Each command once, with the runs it made."""
    groups: dict[str, list[str]] = {}
    for run in runs:
        command = shlex.join(run.command) if run.command else "(started from Python)"
        made = f"{run.task} {run.variant} seed {run.seed}: {run.folder}, finished {run.result['date']}"
        starts = run.environment.get("starts") or []
        resumed = [str(start.get("from_step")) for start in starts[1:] if isinstance(start, dict)]
        groups.setdefault(command, []).append(made + (f", resumed from step {', '.join(resumed)}" if resumed else ""))
    return list(groups.items())
