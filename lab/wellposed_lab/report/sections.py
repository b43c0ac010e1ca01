"""What the page says of one task, its tables, figures and the sentences before them, and of runs
that have not ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from wellposed.measurement import WEIGHT_COLUMNS
from wellposed.options import flat_options
from wellposed.text_table import MISSING, format_number
from wellposed_lab.charts import Panel, lines, where
from wellposed_lab.report import aggregate, figures
from wellposed_lab.report.aggregate import TaskComparison, VariantResult, metric_words
from wellposed_lab.report.figures import Groups, Numbers, Weights
from wellposed_lab.report.html_table import Cell, Column, CsvLink, Table, csv_link, slug
from wellposed_lab.report.runs import Run, first_alarm, is_finite, read_metrics
from wellposed_lab.tasks.data.remarks import data_remarks

Runs = Sequence[Sequence[Run]]
"""The finished runs of each variant."""
LEVELS = 9
"""Colours of a table of answers; the page's style names them h0, h1, ..."""
SEED_COLUMNS = 8
"""Seeds up to which each has its own column."""
LABELS, TEXTS = 20, 6
"""Labels up to which answers are counted in a table, and texts of a kind that are shown."""
VARIANT = Column("variant", "variant", "text")
COUNTED = ("parameters", "steps", "best_step", "tokens", "seconds", "tokens_per_second")
TRAINING = {name: (name, 1, name.replace("_", " ")) for name in COUNTED}
TRAINING["seconds"] = ("seconds", 1, "time, s")
TRAINING["peak_memory_mib"] = ("peak_memory_bytes", 2**20, "peak memory, MiB")
"""Column -> entry of ``train_info``, its unit and the heading."""


def task_section(
    number: int, task: TaskComparison, runs: Runs, numbers: Numbers, worth: float | None
) -> dict[str, Any]:
    """Return what the template shows of one task; ``runs`` are those of each variant, with their files read."""
    name = f"{number}-{slug(task.task)}"[:40]
    groups = {of.variant: found for of, found in zip(task.variants, runs, strict=True) if found}
    weights = _weights(groups)
    measured = [variant for variant, _, _ in weights]
    no_roles = "has no measurement, as no weight of its model has a known role"
    notes = [f"note: {each} {no_roles}" for each in groups if each not in measured]
    alarms = ((of, run.seed, first_alarm(run.metrics)) for of in groups for run in groups[of])
    notes += [f"{of}, seed {seed}: {alarm}" for of, seed, alarm in alarms if alarm]
    of_data = [line for run in chain(*runs) for line in data_remarks(run.result.get("data") or {})]
    distinct, learned = aggregate.distinct_metrics(task), ""
    tests = [record for record in task.records() if record["metric"] in distinct]
    differences = csv_link(f"{name}-differences", list(tests[0]), tests)
    drawn = [figures.differences_figure(f"{name}-differences", task, tests, numbers)]
    drawn += figures.certified_figures(name, groups, numbers)
    drawn += figures.curve_figures(name, task, groups, numbers)
    drawn += [figures.spectra_figure(f"{name}-spectra", weights, numbers)]
    drawn += [figures.orthogonality_figure(f"{name}-orthogonality", weights)]
    if all(result.learned and not result.failed for result in task.variants):
        words, reference = metric_words(task.reference_metric), format_number(task.reference_value)
        learned = f"Every variant learned: {words} is better than the reference {reference}"
    return {
        "anchor": f"task-{number}",
        "name": task.task,
        "verdict": aggregate.verdict(task),
        "answer": _answer(task, differences),
        "learned": learned,
        "notes": [
            *(f"note: {note}" for note in task.notes),
            *notes,
            *(f"data: {line}" for line in dict.fromkeys(of_data)),
            *task.worth(worth),
        ],
        "results": _results(f"{name}-results", task),
        "figures": [figure for figure in drawn if figure],
        "confusions": _confusions(f"{name}-answers", groups),
        "texts": _texts(f"{name}-texts", groups),
        "training": _training(f"{name}-training", groups),
        "settings": _settings(f"{name}-settings", groups),
        "weights": _weight_table(f"{name}-weights", weights) if weights else None,
        "data": _data(runs),
    }


def _answer(task: TaskComparison, data: CsvLink) -> Table | None:
    """Return what is said of each variant; None where nothing is."""
    rows, first = [], task.variants[0].variant
    for result in task.variants:
        test = result.comparison
        said = [test.verdict] if test else ["the baseline"] if len(task.variants) > 1 else []
        if result.learned is False:
            said.append(task.unlearned(result).removeprefix(f"{result.variant} "))
        text, style = "; ".join(said), "bad" if result.learned is False else ""
        mean = str(result.metrics.get(task.metric, MISSING))
        rows.append({"variant": result.variant, "mean": mean, "answer": Cell(text, text, style)})
    words = metric_words(task.metric)
    columns = [VARIANT, Column("mean", words), Column("answer", "answer", "wrap")]
    caption = f"Each variant against {first}, by {words}"
    anything = any(row["answer"].text for row in rows)
    return Table("answer", caption, columns, rows, data) if anything else None


def _weights(groups: Groups) -> Weights:
    """Return the measurements before and after training of every variant whose runs all have
    both."""
    return [
        (
            variant,
            figures.mean_rows([run.initial.rows for run in runs if run.initial]),
            figures.mean_rows([run.final.rows for run in runs if run.final]),
        )
        for variant, runs in groups.items()
        if all(run.initial and run.final for run in runs)
    ]


def _results(name: str, task: TaskComparison) -> Table:
    """Return every number of every variant: each seed, the means, the test."""
    first = task.variants[0].variant
    seeds = sorted({seed for result in task.variants for seed in (*result.seeds, *result.failed)})
    every = {f"{name},valid": value for name, value in task.reference.items()}
    first = next(run for runs in task.runs for run in runs)
    every |= first.result.get("train_reference") or {}
    references = {metric_words(name): value for name, value in every.items()}
    reference = ", ".join(f"{name} {format_number(value)}" for name, value in references.items())
    words, direction = metric_words(task.metric), "higher" if task.higher_is_better else "lower"
    several = any(len(result.seeds) > 1 for result in task.variants)
    each = [Column(f"seed {seed}", f"seed {seed}") for seed in seeds]
    means = []
    for metric in dict.fromkeys([task.metric, *task.metrics]):
        means += [Column(metric, metric_words(metric))]
        means += [Column(f"{metric} standard error", "", "hidden")] if several else []
    return Table(
        name,
        f"{words[0].upper()}{words[1:]}: {direction} is better; other metrics"
        + (", mean ± standard error" if several else "")
        + (f". Reference, the best guess that ignores the input: {reference}" if reference else ""),
        [
            VARIANT,
            *(each if len(seeds) <= SEED_COLUMNS else [Column("seeds", "seeds")]),
            means[0],
            Column("difference", f"difference from {first}"),
            Column("p", "p", digits=3),
            Column("p_holm", "p (Holm)", digits=3),
            Column("learned", "learned", "text"),
            *means[1:],
        ],
        [_result_row(task, result) for result in task.variants],
    )


def _result_row(task: TaskComparison, result: VariantResult) -> dict[str, Any]:
    summary, test = result.metrics.get(task.metric), result.comparison
    values = dict(zip(result.seeds, summary.values, strict=True)) if summary else {}
    of_all = f"{len(result.seeds)} of {len(result.seeds) + len(result.failed)}"
    difference = getattr(test, "mean_difference", None)
    row = {
        "variant": result.variant,
        **{f"seed {seed}": value for seed, value in values.items()},
        **{f"seed {seed}": Cell("no result", "no result", "bad") for seed in result.failed},
        "seeds": Cell(of_all, of_all, "bad") if result.failed else len(result.seeds),
        "difference": None if difference is None else Cell(difference, f"{difference:+.4g}"),
        "p": getattr(test, "p_value", None),
        "p_holm": getattr(test, "p_holm", None),
        "learned": {None: None, True: "yes", False: Cell("no", "no", "bad")}[result.learned],
    }
    for metric, found in result.metrics.items():
        row[metric] = Cell(found.mean, str(found))
        row[f"{metric} standard error"] = found.standard_error
    return row


def _confusions(name: str, groups: Groups) -> list[Table]:
    """Return, for each classifier, how many examples of each label got each answer, over seeds."""
    tables = []
    for variant, runs in groups.items():
        labels = runs[0].examples.get("labels", ())
        found = [run.examples for run in runs if run.examples.get("labels") == labels]
        if not 0 < len(labels) <= LABELS:
            continue
        rows = []
        for place, label in enumerate(labels):
            line = [sum(each["counts"][place][k] for each in found) for k in range(len(labels))]
            shade = [f"heat h{round((LEVELS - 1) * n / (sum(line) or 1))}" for n in line]
            cells = [Cell(n, str(n), of) for n, of in zip(line, shade, strict=True)]
            rows.append({"(label)": label, **dict(zip(labels, cells, strict=True))})
        columns = [Column("(label)", "label \\ answer", "text"), *(Column(of, of) for of in labels)]
        tables.append(Table(f"{name}-{len(tables) + 1}", variant, columns, rows))
    return tables


def _texts(name: str, groups: Groups) -> Table | None:
    """Return texts of *test* with what each classifier answers, those on which they differ first, or
    what each language model makes of the first texts."""
    firsts = {of: runs[0] for of, runs in groups.items() if runs[0].examples.get("texts")}
    columns = [Column(of, of, "wrap") for of in firsts]
    kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    answers = zip(*(run.examples["texts"] for run in firsts.values()), strict=False)
    for place, each in enumerate(answers):
        row: dict[str, Any] = {"(text)": each[0][0], "(label)": each[0][1]}
        for (variant, run), (_, label, answer) in zip(firsts.items(), each, strict=True):
            held = run.words.shown[place : place + 1] if run.words else []
            said = "; ".join([answer, *filter(None, map(str, held))])
            row[variant] = Cell(said, said, "good" if answer == label else "bad")
        kinds.setdefault(tuple(row[of].style for of in firsts), []).append(row)
    differing = sorted(kinds, key=lambda kind: -len(set(kind)))
    rows = [row for kind in differing for row in kinds[kind][:TEXTS]]
    fixed = [Column("(text)", "text", "wrap"), Column("(label)", "label", "text")]
    written = [
        {"variant": of, "(text)": begin, "goes on": rest}
        for of, runs in groups.items()
        for begin, rest in runs[0].examples.get("samples", ())
    ]
    if written and not rows:
        told = [VARIANT, fixed[0], Column("goes on", "goes on", "wrap")]
        return Table(name, "What the models make of texts of test, first seed", told, written)
    caption = "Texts of test and answers, first seed: those on which the variants differ come first"
    return Table(name, caption, [*fixed, *columns], rows[: 2 * TEXTS]) if rows else None


def _training(name: str, groups: Groups) -> Table:
    rows = []
    for variant, runs in groups.items():
        row: dict[str, Any] = {"variant": variant}
        for key, (entry, unit, _) in TRAINING.items():
            found = [run.result["train_info"].get(entry) for run in runs]
            values = [value / unit for value in found if isinstance(value, (int, float))]
            row[key] = sum(values) / len(values) if values else None
        rows.append(row)
    columns = [
        Column(key, words, "number" if key == "seconds" else "count")
        for key, (*_, words) in TRAINING.items()
    ]
    return Table(name, "Training, mean over seeds", [VARIANT, *columns], rows)


def _settings(name: str, groups: Groups) -> Table | None:
    """Return the settings in which variants differ; None where there are none."""
    configs = {of: flat_options(runs[0].result["config"]) for of, runs in groups.items()}
    rows = []
    for key in sorted({key for config in configs.values() for key in config}):
        row = {variant: str(config.get(key, "not set")) for variant, config in configs.items()}
        if key not in ("variant", "train.seed") and len(set(row.values())) > 1:
            rows.append({"(setting)": key, **row})
    columns = [Column("(setting)", "setting", "text"), *(Column(of, of, "text") for of in groups)]
    return Table(name, "Settings in which the variants differ", columns, rows) if rows else None


def _weight_table(name: str, weights: Weights) -> Table:
    numbers = {
        "scale_free_orthogonality_error": "err_orth (best scale)", "orthogonality_error": "err_orth (raw)",
        "sigma_max": "σ max", "sigma_min": "σ min", "condition_number": "condition", "stable_rank": "stable rank",
    }  # fmt: skip
    every = figures.weight_rows(weights)
    rows = []
    for row in every:
        place = [row[part] for part in ("stack", "layer", "role") if row[part] is not None]
        weight = " ".join(map(str, place)).replace("_", " ")
        rows.append({**row, "weight": weight, "shape": f"{row['rows']} × {row['cols']}"})
    rows.sort(key=lambda row: row["when"])
    columns = [VARIANT, *(Column(key, key, "text") for key in ("when", "weight", "shape"))]
    columns += [Column(key, words, digits=3) for key, words in numbers.items()]
    data = csv_link(name, ["variant", "when", *WEIGHT_COLUMNS], every)
    return Table(name, "Every weight, after and before training", columns, rows, data)


def _data(runs: Runs) -> list[tuple[str, str]]:
    """Description of the data; a setting in which runs differ shows all its values."""
    described = [("", flat_options(run.result.get("data") or {})) for of in runs for run in of]
    return [(name, " | ".join(values)) for name, values in by_value(described).items()]


def by_value(described: Sequence[tuple[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """Return, for each setting, its values as text and the names of those that have each."""
    found: dict[str, dict[str, list[str]]] = {}
    for name in dict.fromkeys(name for _, values in described for name in values):
        found[name] = {}
        for of, values in described:
            found[name].setdefault(shown(values.get(name, "-")), []).append(of)
    return found


def shown(value: Any) -> str:
    """Return a setting as text."""
    if value is None or value == []:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def running_section(runs: Sequence[Run], numbers: Numbers) -> dict[str, Any] | None:
    """Return how far unfinished runs are and their losses so far; None where there is no such run."""
    if not runs:
        return None
    table, colours = [], {}
    curves: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        rows = read_metrics(run.folder / "metrics.jsonl", going=True)
        steps = flat_options(run.result["config"]).get("train.steps")
        row = {"run": str(run.folder), "task": run.task, "variant": run.variant, "seed": run.seed}
        row |= {"step": max((each["step"] for each in rows), default=0)}
        table.append(row | {"steps": steps if is_finite(steps) else None})
        label = f"{run.variant}, seed {run.seed}"
        colours[label] = numbers[run.variant]
        for split in ("train", "valid"):
            mine = [each for each in where(rows, split=split) if is_finite(each.get("loss"))]
            curves.setdefault((run.task, split), []).extend({**each, "of": label} for each in mine)
            table[-1] |= {split: mine[-1]["loss"]} if mine else {}
    panels, logged = [], []
    for (task, split), rows in curves.items():
        series = [replace(s, colour=colours[s.label]) for s in lines(rows, "step", "loss", by="of")]
        title = f"{task}: {metric_words(f'loss,{split}')}"
        panels += [Panel(title, "step", title, series)] if series else []
        logged += [{"run": r["of"], "task": task, **r} for r in rows]
    headings = {
        "seed": "seed", "step": "step", "steps": "of steps", "train": "training loss (nats)",
        "valid": "validation loss (nats)",
    }  # fmt: skip
    columns = [Column(name, name, "text") for name in ("run", "task", "variant")]
    columns += [Column(name, words, digits=6) for name, words in headings.items()]
    words = "Still running, or killed: last values logged"
    data = csv_link("running-curves", ["run", "task", "split", "step", "loss"], logged)
    drawn = figures.figure("Losses so far", "running-curves", panels, "", data) if panels else None
    return {"table": Table("running", words, columns, table), "figure": drawn}
