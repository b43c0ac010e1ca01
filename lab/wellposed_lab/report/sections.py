"""The section of one task: its tables, figures and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from wellposed.options import flat_options
from wellposed.text_table import format_number
from wellposed_lab.report import comparison, figures
from wellposed_lab.report.comparison import TaskComparison
from wellposed_lab.report.figures import Groups, Numbers, Weights
from wellposed_lab.report.html_table import Cell, Column, CsvLink, Table, csv_link, slug
from wellposed_lab.report.metric_words import metric_words
from wellposed_lab.report.runs import Run, first_alarm, rate_notes, tuned_rates
from wellposed_lab.tasks.data.remarks import data_remarks

Runs = Sequence[Sequence[Run]]
"""The finished runs of each variant."""
VARIANT = Column("variant", "variant", "text")
COUNTED = ("parameters", "steps", "best_step", "tokens", "seconds", "tokens_per_second")
TRAINING = {name: (name, 1, name.replace("_", " ")) for name in COUNTED}
TRAINING["seconds"] = ("seconds", 1, "time, s")
TRAINING["peak_memory_mib"] = ("peak_memory_bytes", 2**20, "peak memory, MiB")
"""Column -> entry of ``train_info``, its unit and the heading."""
CERTIFIED = {"words": "certified, replaced words: {}", "certified": "certified, radius {}"}
"""Heading of a certified accuracy among the answers, by its metric."""


def task_section(
    number: int, task: TaskComparison, runs: Runs, numbers: Numbers, worth: float | None
) -> dict[str, Any]:
    """Return the values of one task for the template; ``runs`` are those of each variant, fully read."""
    name = f"{number}-{slug(task.task)}"[:40]
    groups = {
        result.variant: mine for result, mine in zip(task.variants, runs, strict=True) if mine
    }
    weights = _weights(groups)
    no_roles = "has no measurement: its model has no weights with known roles"
    unmeasured = groups.keys() - {variant for variant, *_ in weights}
    notes = [f"note: {group} {no_roles}" for group in groups if group in unmeasured]
    alarms = (
        (variant, run.seed, first_alarm(run.metrics))
        for variant in groups
        for run in groups[variant]
    )
    notes += [f"{variant}, seed {seed}: {alarm}" for variant, seed, alarm in alarms if alarm]
    of_data = [line for run in chain(*runs) for line in data_remarks(run.result.get("data") or {})]
    distinct = comparison.distinct_metrics(task)
    learned = ""
    tests = [record for record in task.records() if record["metric"] in distinct]
    differences = csv_link(f"{name}-differences", list(tests[0]), tests)
    tuned = next((tuned_rates(run.folder) for run in chain(*runs)), [])
    notes += rate_notes(tuned)
    drawn = figures.certified_figures(name, groups, numbers)
    drawn += figures.curve_figures(name, task, groups, numbers)
    drawn += [
        figures.rates_figure(f"{name}-rates", tuned, numbers),
        figures.differences_figure(f"{name}-differences", task, tests, numbers, worth),
        figures.spectra_figure(f"{name}-spectra", weights, numbers),
        figures.orthogonality_figure(f"{name}-orthogonality", weights, numbers),
    ]

    if all(result.learned and not result.failed for result in task.variants):
        words = metric_words(task.reference_metric)
        reference = format_number(task.reference_value)
        learned = f"Every variant learned: {words} is better than the reference {reference}"

    (rule, verdicts) = task.worth_verdicts(worth)
    first = task.variants[0]
    unlearned = [f"undecided: {first.variant} did not learn"] if first.learned is False else []
    same = unlearned or [*{*verdicts.values()}][: len({*verdicts.values()}) == 1]
    return {
        "anchor": f"task-{number}",
        "name": task.task.replace(", ...)", ")"),
        "verdict": comparison.verdict(task),
        "answer": _answer(task, differences, {} if same else verdicts),
        "learned": learned,
        "worth": [f"Worth it? {', '.join(verdicts)}: {text}" for text in same if rule],
        "rule": rule,
        "notes": [
            *(f"note: {note}" for note in task.notes),
            *notes,
            *(f"data: {line}" for line in dict.fromkeys(of_data)),
        ],
        "results": comparison.results_table(task, f"{name}-results"),
        "figures": [figure for figure in drawn if figure],
        "training": _training(f"{name}-training", groups),
        "data": _data(runs),
    }


def _answer(task: TaskComparison, data: CsvLink, worth: dict[str, str]) -> Table | None:
    """Return a row for each variant: means, certified accuracy and verdicts; None if it has
    nothing to add to the sentence."""
    rows = []
    first = task.variants[0].variant
    certified = [name for name in task.metrics if name.partition("@")[0] in CERTIFIED]
    for result in task.variants:
        test = result.comparison
        verdicts = (
            [test.verdict + result.not_tuned_alike]
            if test
            else ["the baseline"]
            if len(task.variants) > 1
            else []
        )
        if result.learned is False:
            verdicts.append(task.unlearned(result).removeprefix(f"{result.variant} "))
        text = "; ".join(verdicts)
        style = "bad" if result.learned is False else ""
        means = {name: Cell(metric.mean, str(metric)) for name, metric in result.metrics.items()}
        verdict = {"answer": Cell(text, text, style), "worth": worth.get(result.variant)}
        rows.append({"variant": result.variant, **means, **verdict})

    words = metric_words(task.metric)
    columns = [VARIANT, Column(task.metric, words)]
    for metric in certified:
        kind, _, size = metric.partition(",")[0].partition("@")
        columns.append(Column(metric, CERTIFIED[kind].format(size)))

    columns += [Column("answer", "answer", "wrap")]
    columns += [Column("worth", "worth it?", "wrap")] if worth else []
    caption = f"Each variant against {first}, by {words}"
    anything = certified or any(row["answer"].text for row in rows)
    return Table("answer", caption, columns, rows, data) if anything else None


def _weights(groups: Groups) -> Weights:
    """Return measurements before and after training of each variant whose runs have both."""
    return [
        (
            variant,
            figures.mean_rows([run.initial.rows for run in runs if run.initial]),
            figures.mean_rows([run.final.rows for run in runs if run.final]),
        )
        for variant, runs in groups.items()
        if all(run.initial and run.final for run in runs)
    ]


def _training(name: str, groups: Groups) -> Table:
    rows = []
    for variant, runs in groups.items():
        row: dict[str, Any] = {"variant": variant}
        for key, (entry, unit, _) in TRAINING.items():
            entries = [run.result["train_info"].get(entry) for run in runs]
            values = [value / unit for value in entries if isinstance(value, (int, float))]
            row[key] = sum(values) / len(values) if values else None
        rows.append(row)

    columns = [
        Column(key, words, "number" if key == "seconds" else "count")
        for key, (*_, words) in TRAINING.items()
    ]
    return Table(name, "Training, mean over seeds", [VARIANT, *columns], rows)


def _data(runs: Runs) -> list[tuple[str, str]]:
    """Return the description of the data; settings in which runs differ show all values."""
    described = [
        ("", flat_options(run.result.get("data") or {})) for group in runs for run in group
    ]
    return [(name, " | ".join(values)) for name, values in by_value(described).items()]


def by_value(described: Sequence[tuple[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """Return, for each setting, its values as text and the names that have each."""
    groups: dict[str, dict[str, list[str]]] = {}
    for name in dict.fromkeys(name for _, values in described for name in values):
        groups[name] = {}
        for variant, values in described:
            groups[name].setdefault(as_text(values.get(name, "-")), []).append(variant)
    return groups


def as_text(value: Any) -> str:
    """Return a setting as text."""
    if value is None or value == []:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
