"""What the page says of one task: its tables, its figures and the sentences before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wellposed.measurement import WEIGHT_COLUMNS
from wellposed.options import flat_options
from wellposed.report._aggregate import TaskComparison, VariantResult, conclusions, metric_words
from wellposed.report._figures import (
    Numbers,
    certified_figure,
    curves_figure,
    mean_rows,
    spectra_figure,
    weight_rows,
)
from wellposed.report._heat import Weights, heat_maps
from wellposed.report._html_table import Cell, Column, Table, csv_link, slug
from wellposed.report._runs import Run
from wellposed.text_table import format_number

SEED_COLUMNS = 8
"""Seeds up to which each has its own column."""
VARIANT = Column("variant", "variant", "text")
TRAINING = {
    "parameters": "parameters", "steps": "steps", "best_step": "best step", "tokens": "tokens",
    "seconds": "time, s", "tokens_per_second": "tokens per second", "peak_memory_mib": "peak memory, MiB",
}  # fmt: skip
MEASURED = {"peak_memory_mib": "peak_memory_bytes"}


def task_section(
    number: int, task: TaskComparison, runs: Sequence[Sequence[Run]], numbers: Numbers
) -> dict[str, Any]:
    """Return what the template shows of one task; ``runs`` are those of each variant, with their files read."""
    name = f"{number}-{slug(task.task)}"[:40]
    weights = _weights(task, runs)
    measured = {variant for variant, _, _ in weights}
    unmeasured = [r.variant for r in task.variants if r.seeds and r.variant not in measured]
    notes = [
        f"note: {each} has no measurement, as no weight of its model has a known role"
        for each in unmeasured
    ]
    figures = (
        curves_figure(f"{name}-curves", task, runs, numbers),
        certified_figure(f"{name}-certified", task, runs, numbers),
        spectra_figure(f"{name}-spectra", weights, numbers),
    )
    return {
        "anchor": f"task-{number}",
        "name": task.task,
        "bad": _not_learned(task),
        "good": _all_learned(task),
        "conclusions": [*conclusions(task), *notes],
        "tested": any(result.comparison for result in task.variants),
        "results": _results(f"{name}-results", task),
        "metrics": _metrics(f"{name}-metrics", task),
        "figures": [figure for figure in figures if figure],
        "heat": heat_maps(f"{name}-orthogonality", weights),
        "training": _training(f"{name}-training", task, runs),
        "settings": _settings(f"{name}-settings", task, runs),
        "weights": _weight_table(f"{name}-weights", weights) if weights else None,
        "data": _data(runs),
    }


def _weights(task: TaskComparison, runs: Sequence[Sequence[Run]]) -> Weights:
    """Return the measurements before and after training of every variant whose runs all have
    both."""
    return [
        (
            result.variant,
            mean_rows([run.initial.rows for run in group if run.initial]),
            mean_rows([run.final.rows for run in group if run.final]),
        )
        for result, group in zip(task.variants, runs, strict=True)
        if group and all(run.initial and run.final for run in group)
    ]


def _not_learned(task: TaskComparison) -> list[str]:
    words = metric_words(task.reference_metric)
    return [
        f"{result.variant} did not learn: {words}"
        f" {format_number(result.metrics[task.reference_metric].mean)} is no better than the"
        f" reference {format_number(task.reference_value)}"
        for result in task.variants
        if result.learned is False
    ]


def _all_learned(task: TaskComparison) -> str:
    if any(not result.learned or result.failed for result in task.variants):
        return ""
    words, reference = metric_words(task.reference_metric), format_number(task.reference_value)
    return f"Every variant learned: {words} is better than the reference {reference}"


def _results(name: str, task: TaskComparison) -> Table:
    first = task.variants[0].variant
    seeds = sorted({seed for result in task.variants for seed in (*result.seeds, *result.failed)})
    each = [Column(f"seed {seed}", f"seed {seed}") for seed in seeds]
    reference = ", ".join(
        f"{metric_words(f'{k},valid')} {format_number(v)}" for k, v in task.reference.items()
    )
    words, direction = metric_words(task.metric), "higher" if task.higher_is_better else "lower"
    return Table(
        name,
        f"{words[0].upper()}{words[1:]}: {direction} is better"
        + (f". Reference, the best guess that ignores the input: {reference}" if reference else ""),
        [
            VARIANT,
            *(each if len(seeds) <= SEED_COLUMNS else [Column("seeds", "seeds")]),
            Column("mean", "mean"),
            Column("standard_error", "standard error", digits=2),
            Column("difference", f"difference from {first}"),
            Column("p", "p", digits=3),
            Column("p_holm", "p (Holm)", digits=3),
            Column("learned", "learned", "text"),
            Column("verdict", f"against {first}", "wrap"),
        ],
        [_result_row(task, result) for result in task.variants],
    )


def _result_row(task: TaskComparison, result: VariantResult) -> dict[str, Any]:
    summary, test = result.metrics.get(task.metric), result.comparison
    values = dict(zip(result.seeds, summary.values, strict=True)) if summary else {}
    count = len(result.seeds)
    all_seeds = count + len(result.failed)
    difference = test.mean_difference if test else None
    return {
        "variant": result.variant,
        **{f"seed {seed}": value for seed, value in values.items()},
        **{f"seed {seed}": Cell("no result", "no result", "bad") for seed in result.failed},
        "seeds": (
            Cell(f"{count} of {all_seeds}", f"{count} of {all_seeds}", "bad")
            if result.failed
            else count
        ),
        "mean": summary.mean if summary else None,
        "standard_error": summary.standard_error if summary else None,
        "difference": None if difference is None else Cell(difference, f"{difference:+.4g}"),
        "p": test.p_value if test else None,
        "p_holm": test.p_holm if test else None,
        "learned": {None: None, True: "yes", False: Cell("no", "no", "bad")}[result.learned],
        "verdict": test.verdict if test else "first variant",
    }


def _metrics(name: str, task: TaskComparison) -> Table | None:
    names = [metric for metric in task.metrics if metric != task.metric]
    if not names:
        return None
    single = all(len(result.seeds) <= 1 for result in task.variants)
    rows = []
    for result in task.variants:
        found = {metric: result.metrics[metric] for metric in names if metric in result.metrics}
        means = {metric: Cell(summary.mean, str(summary)) for metric, summary in found.items()}
        errors = {
            f"{metric} standard error": summary.standard_error for metric, summary in found.items()
        }
        rows.append({"variant": result.variant, **means, **errors})
    columns = [Column(metric, metric_words(metric)) for metric in names]
    errors = [Column(f"{metric} standard error", "", "hidden") for metric in names]
    caption = f"Every other metric, mean{'' if single else ' ± standard error'}"
    return Table(name, caption, [VARIANT, *columns, *([] if single else errors)], rows)


def _training(name: str, task: TaskComparison, runs: Sequence[Sequence[Run]]) -> Table:
    columns = [
        Column(key, unit, "number" if key == "seconds" else "count")
        for key, unit in TRAINING.items()
    ]
    rows = [
        _training_row(r.variant, group)
        for r, group in zip(task.variants, runs, strict=True)
        if group
    ]
    return Table(name, "Training, mean over seeds", [VARIANT, *columns], rows)


def _training_row(variant: str, group: Sequence[Run]) -> dict[str, Any]:
    row: dict[str, Any] = {"variant": variant}
    for name in TRAINING:
        found = [run.result["train_info"].get(MEASURED.get(name, name)) for run in group]
        values = [value for value in found if isinstance(value, (int, float))]
        row[name] = sum(values) / len(values) if values else None
    if row["peak_memory_mib"]:
        row["peak_memory_mib"] /= 2**20
    return row


def _settings(name: str, task: TaskComparison, runs: Sequence[Sequence[Run]]) -> Table | None:
    """Return the settings in which variants differ; None where there are none."""
    groups = [(r.variant, group[0]) for r, group in zip(task.variants, runs, strict=True) if group]
    configs = {variant: flat_options(run.result["config"]) for variant, run in groups}
    names = sorted(
        {setting for config in configs.values() for setting in config} - {"variant", "train.seed"}
    )
    values = [
        {v: str(config.get(setting, "not set")) for v, config in configs.items()}
        for setting in names
    ]
    rows = [
        {"(setting)": setting, **row}
        for setting, row in zip(names, values, strict=True)
        if len(set(row.values())) > 1
    ]
    columns = [
        Column("(setting)", "setting", "text"),
        *(Column(variant, variant, "text") for variant in configs),
    ]
    return Table(name, "Settings in which the variants differ", columns, rows) if rows else None


def _weight_table(name: str, weights: Weights) -> Table:
    numbers = {
        "scale_free_orthogonality_error": "err_orth (best scale)", "orthogonality_error": "err_orth (raw)",
        "sigma_max": "σ max", "sigma_min": "σ min", "condition_number": "condition", "stable_rank": "stable rank",
    }  # fmt: skip
    rows = []
    for variant, before, after in weights:
        initial = {(row["path"], row["role"]): row for row in before}
        for row in after:
            place = " ".join(
                str(part) for part in (row["stack"], row["layer"], row["role"]) if part is not None
            )
            start = initial.get((row["path"], row["role"]), {})
            values = {
                f"{key} {when}": r.get(key)
                for key in numbers
                for when, r in (("before", start), ("after", row))
            }
            shape = f"{row['rows']} × {row['cols']}"
            rows.append(
                {"variant": variant, "weight": place.replace("_", " "), "shape": shape, **values}
            )
    columns = [
        Column(f"{key} {when}", f"{words} {when}", digits=3)
        for key, words in numbers.items()
        for when in ("before", "after")
    ]
    fixed = [VARIANT, Column("weight", "weight", "text"), Column("shape", "shape", "text")]
    data = csv_link(name, ["variant", "when", *WEIGHT_COLUMNS], weight_rows(weights))
    return Table(name, "Every weight, before and after training", [*fixed, *columns], rows, data)


def _data(runs: Sequence[Sequence[Run]]) -> list[tuple[str, str]]:
    """Description of the data; a setting in which runs differ shows all its values."""
    described = [flat_options(run.result.get("data") or {}) for group in runs for run in group]
    names = list(dict.fromkeys(name for description in described for name in description))
    return [
        (name, " | ".join(dict.fromkeys(shown(d.get(name, "-")) for d in described)))
        for name in names
    ]


def shown(value: Any) -> str:
    """Return a setting as text."""
    if value is None or value == []:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
