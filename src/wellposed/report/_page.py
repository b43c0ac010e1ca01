"""One HTML page about runs and reproductions that needs nothing beside it: for each task its tables
and figures, and the sentences before them."""

from __future__ import annotations

import base64
import hashlib
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from wellposed.charts import Panel, lines, pixels, where
from wellposed.errors import DataError, import_extra
from wellposed.measurement import WEIGHT_COLUMNS
from wellposed.options import flat_options
from wellposed.report import _aggregate as aggregate
from wellposed.report import _figures as figures
from wellposed.report import _runs as run_files
from wellposed.report._aggregate import TaskComparison, VariantResult, metric_words
from wellposed.report._artefacts import find_artefacts, overview
from wellposed.report._figures import LEVELS, Groups, Numbers, Weights, chart, fitted, forest
from wellposed.report._html_table import Cell, Column, Table, csv_link, slug
from wellposed.report._runs import Run, first_alarm, is_finite
from wellposed.text_table import MISSING, format_number
from wellposed.training.folder import durable_files

Runs = Sequence[Sequence[Run]]
"""The finished runs of each variant."""
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
COLOURS = 8
"""Colours of variants in the page's style, c0, c1, ...: told apart with any kind of colour vision."""


def build_report(
    run_dirs: Sequence[Path], out: Path, *, refresh: int | None = None, worth: float | None = None
) -> Path:
    """Write one HTML page that holds everything it shows, the data of every table and figure as CSV
    included.

    The page holds, per task: the answer in a sentence; the difference of each variant from the
    first with its 95 % interval, by every metric, and what the paired test says; certified and
    attacked accuracy where they were measured; loss curves, singular values, the orthogonality
    error before and after training by layer and role, every number, what differs between variants;
    then what ``wellposed reproduce`` left in the folders, the runs that have not ended, those that
    do not count and why, the environment and the exact commands. Tables are sorted by a click or a
    key, variants are shown and hidden, curves give their values; without a script the page is the
    same, at rest. It fetches nothing, and its Content-Security-Policy forbids to. Status: the same
    numbers as `aggregate`; the same folders give the same bytes.

    Args:
        run_dirs: run folders, or folders that hold run folders or reproductions.
        out: file to write, replaced in one step where it exists.
        worth: smallest gain that would be worth it, in the unit of the metric; a hundredth of the first
            variant's mean where not given.
        refresh: seconds after which an open page loads itself again; for pages that are written
            again and again.

    Returns:
        ``out``.

    Raises:
        DataError: no run; a damaged ``result.json``; a finished run whose metrics, measurements or
            environment are missing or cut off. All files are named in one message.
        ConfigError: matplotlib or jinja2 is not installed.

    Cost: seconds; no torch. When not to use: for numbers to go on with, use `aggregate`.

    >>> build_report([Path("no-such-folder")], Path("report.html"))
    Traceback (most recent call last):
    ...
    wellposed.errors.DataError: runs cannot be read:
      no-such-folder: does not exist
    """
    out = Path(out)
    artefacts = find_artefacts(run_dirs)
    found = run_files.find_runs(run_dirs, needed=not artefacts)
    comparison, details, unfinished, numbers, sections = _read(found, worth)
    environment, records = _environment(), comparison.records()
    page = environment.get_template("report.html.j2").render(
        sections=sections,
        artefacts=artefacts,
        claims=overview(artefacts),
        running=_running_section(unfinished, numbers),
        numbers=numbers,
        colours=COLOURS,
        remarks=comparison.remarks(),
        excluded=_excluded(comparison),
        results=csv_link("results", list(records[0]), records) if records else None,
        environment=_environments(list(details.values())),
        commands=_commands(list(details.values())),
        runs=len(details),
        dates=sorted(str(run.result["date"])[:10] for run in details.values()),
        refresh=refresh,
        **_assets(environment),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    durable_files.replace_file(out, page.encode(errors="backslashreplace"))  # a name may be no text
    return out


def figure_images(*run_dirs: Path) -> dict[str, Any]:
    """Return the figures of the page on some runs as pixels, by the names of their data."""
    *_, sections = _read(run_files.find_runs(run_dirs))
    drawn = [(each["data"].file, each["panels"]) for of in sections for each in of["figures"]]
    return {file.removesuffix(".csv"): pixels(panels) for file, panels in drawn}


def _read(found: run_files.FoundRuns, worth: float | None = None) -> tuple[Any, ...]:
    """Return the comparison of runs, those that finished with their files read, those that go on,
    the numbers of the variants, and what the page says of each task."""
    comparison = aggregate.compare_runs(found)
    finished = (run for task in comparison.tasks for group in task.runs for run in group)
    details = {run.folder: run for run in run_files.load_details(finished)}
    variants = [result.variant for task in comparison.tasks for result in task.variants]
    unfinished = [run for run in found.runs if getattr(run.failure, "status", "") == "unfinished"]
    every = dict.fromkeys([*variants, *(run.variant for run in unfinished)])
    numbers = {name: number for number, name in enumerate(every)}
    sections = []
    for number, task in enumerate(comparison.tasks, start=1):
        runs = [[details[run.folder] for run in group] for group in task.runs]
        sections.append(_task_section(number, task, runs, numbers, worth))
    return comparison, details, unfinished, numbers, sections


def _environment() -> Any:
    jinja2 = import_extra("jinja2", "report", "HTML reports")
    loader, strict = jinja2.PackageLoader("wellposed.report"), jinja2.StrictUndefined
    how = dict.fromkeys(("autoescape", "trim_blocks", "lstrip_blocks"), True)
    return jinja2.Environment(loader=loader, undefined=strict, **how)


def _assets(environment: Any) -> dict[str, Any]:
    """Return style and script, and the hash by which the page's policy knows its one script."""
    from markupsafe import Markup

    source = environment.loader.get_source
    style, script = (source(environment, f"report.{kind}")[0] for kind in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return {"style": Markup(style), "script": Markup(script), "script_hash": f"sha256-{digest}"}


def _excluded(comparison: aggregate.Comparison) -> Table | None:
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
    """Every entry once; where runs differ, each value with the runs it belongs to."""
    described = []
    for run in runs:
        # When and how it was started is told with the commands.
        apart = ("date", "command", "starts")
        values = {name: of for name, of in run.environment.items() if name not in apart}
        values.setdefault("packages", run.result.get("versions") or {})
        described.append((f"{run.task} {run.variant} seed {run.seed}", flat_options(values)))
    return [
        (name, [(value, ", ".join(of) if len(groups) > 1 else "") for value, of in groups.items()])
        for name, groups in _by_value(described).items()
    ]


def _by_value(described: Sequence[tuple[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """Return, for each setting, its values as text and the names of those that have each."""
    found: dict[str, dict[str, list[str]]] = {}
    for name in (name for _, values in described for name in values):
        found[name] = {}
        for of, values in described:
            found[name].setdefault(shown(values.get(name, "-")), []).append(of)
    return found


def _commands(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Each command once, with the runs it made."""
    groups: dict[str, list[str]] = {}
    for run in runs:
        command = shlex.join(run.command) if run.command else "(started from Python)"
        made = f"{run.task} {run.variant} seed {run.seed}: {run.folder}"
        made += f", finished {run.result['date']}"
        resumed = [str(start["from_step"]) for start in run.environment.get("starts", ())[1:]]
        made += f", resumed from step {', '.join(resumed)}" if resumed else ""
        groups.setdefault(command, []).append(made)
    return list(groups.items())


def watch_report(
    run_dirs: Sequence[Path], out: Path, announce: Callable[[str], None], *, every: float = 2.0
) -> None:
    """Write the page of `build_report` whenever a file of the folders changes, until Ctrl-C.

    The page loads itself again in an open browser; the one that is left at the end does not. At
    every moment the file is a whole page. A folder that has no run yet, or a file that is being
    written, is waited for.

    Args:
        run_dirs: run folders, or folders that hold run folders.
        out: file to write.
        announce: called with one line for each page that is written, and for what is waited for.
        every: seconds between two looks.

    Raises:
        ConfigError: matplotlib or jinja2 is not installed.

    Cost: the size and date of every file of the folders at each look; a page where something
    changed.
    """
    refresh = max(2, round(every))
    try:
        seen, said = None, ""
        while True:
            state = _state(run_dirs)
            if state != seen:
                seen, line = state, _write(run_dirs, out, refresh)
                if line != said:
                    said = line
                    announce(line)
            time.sleep(every)
    except KeyboardInterrupt:
        announce(_write(run_dirs, out, None))


def _write(run_dirs: Sequence[Path], out: Path, refresh: int | None) -> str:
    try:
        return f"report: {build_report(run_dirs, out, refresh=refresh)}"
    except DataError as error:
        return f"waiting: {error}"


def _state(run_dirs: Sequence[Path]) -> set[tuple[str, int, int]]:
    """Return name, date and size of every file that a page is made of."""
    found = set()
    for file in (file for folder in run_dirs for file in folder.rglob("*.*")):
        if file.suffix in (".json", ".jsonl", ".toml", ".csv", ".svg", ".md"):
            with suppress(OSError):  # it was renamed or removed meanwhile
                stat = file.stat()
                found.add((str(file), stat.st_mtime_ns, stat.st_size))
    return found


def _task_section(
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
    drawn = figures.certified_figures(name, groups, numbers)
    drawn += figures.curve_figures(name, task, groups, numbers)
    drawn += [figures.spectra_figure(f"{name}-spectra", weights, numbers)]
    return {
        "anchor": f"task-{number}",
        "name": task.task,
        "verdict": aggregate.verdict(task),
        "metric": metric_words(task.metric),
        "notes": [*(f"note: {note}" for note in task.notes), *notes, *task.worth(worth)],
        **_answer(f"{name}-differences", task, numbers),
        "results": _results(f"{name}-results", task),
        "figures": [figure for figure in drawn if figure],
        "maps": figures.orthogonality_maps(f"{name}-orthogonality", weights, numbers),
        "confusions": _confusions(f"{name}-answers", groups),
        "texts": _texts(f"{name}-texts", groups),
        "training": _training(f"{name}-training", groups),
        "settings": _settings(f"{name}-settings", groups),
        "weights": _weight_table(f"{name}-weights", weights) if weights else None,
        "data": _data(runs),
    }


def _answer(name: str, task: TaskComparison, numbers: Numbers) -> dict[str, Any]:
    """Return the forest plots, that of the task's metric with what is said of each variant, and
    their numbers."""
    forests, rows = [], []
    for metric in aggregate.distinct_metrics(task):
        bars, tests = [], [result.comparisons.get(metric) for result in task.variants]
        for result, test in zip(task.variants, tests, strict=True):
            said, bad = _sentence(task, result) if metric == task.metric else ("", False)
            mean = str(result.metrics.get(metric, MISSING))
            bars.append((result.variant, numbers[result.variant], mean, said, bad))
            row = {"metric": metric, "variant": result.variant}
            row |= {n: getattr(test, n, None) for n in ("mean_difference", "pairs", "p_value")}
            row["low"], row["high"] = (test and test.interval) or (None, None)
            rows.append(row)
        forests.append(forest(metric_words(metric), bars, tests))
    data = csv_link(name, list(rows[0]), rows)
    learned = ""
    if all(result.learned and not result.failed for result in task.variants):
        words, reference = metric_words(task.reference_metric), format_number(task.reference_value)
        learned = f"Every variant learned: {words} is better than the reference {reference}"
    return {"forests": forests, "differences": data, "learned": learned}


def _sentence(task: TaskComparison, result: VariantResult) -> tuple[str, bool]:
    """Return what is said of a variant, and whether it is bad."""
    test = result.comparison
    said = [test.verdict] if test else ["the baseline"] if len(task.variants) > 1 else []
    if result.learned is False:
        mean = format_number(result.metrics[task.reference_metric].mean)
        words, reference = metric_words(task.reference_metric), format_number(task.reference_value)
        said.append(f"did not learn: {words} {mean} is no better than the reference {reference}")
    return "; ".join(said), result.learned is False


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
    references = {metric_words(f"{name},valid"): value for name, value in task.reference.items()}
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
    configs = [(of, flat_options(runs[0].result["config"])) for of, runs in groups.items()]
    rows = [
        {"(setting)": key, **{variant: value for value, of in values.items() for variant in of}}
        for key, values in sorted(_by_value(configs).items())
        if key not in ("variant", "train.seed") and len(values) > 1
    ]
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
    return [(name, " | ".join(values)) for name, values in _by_value(described).items()]


def shown(value: Any) -> str:
    """Return a setting as text."""
    if value is None or value == []:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _running_section(runs: Sequence[Run], numbers: Numbers) -> dict[str, Any] | None:
    """Return how far unfinished runs are and their losses so far; None where there is no such run."""
    if not runs:
        return None
    table, colours = [], {}
    curves: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        rows = run_files.read_metrics(run.folder / "metrics.jsonl", going=True)
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
    charts = []
    for (task, split), rows in curves.items():
        series = [replace(s, colour=colours[s.label]) for s in lines(rows, "step", "loss", by="of")]
        panel = Panel(f"{task}: {metric_words(f'loss,{split}')}", "step", "loss (nats)", series)
        charts += [chart(*fitted([panel])[0])] if series else []
    headings = {
        "seed": "seed", "step": "step", "steps": "of steps", "train": "training loss (nats)",
        "valid": "validation loss (nats)",
    }  # fmt: skip
    columns = [Column(name, name, "text") for name in ("run", "task", "variant")]
    columns += [Column(name, words, digits=6) for name, words in headings.items()]
    words = "Still running, or killed: last values logged"
    return {"table": Table("running", words, columns, table), "charts": charts}
