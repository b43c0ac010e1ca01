"""Aggregate runs: per task, every variant over its seeds, against the first variant."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wellposed.errors import DataError
from wellposed.measurement import write_csv
from wellposed.options import flat_options
from wellposed.text_table import format_number, text_table
from wellposed_lab import statistics
from wellposed_lab.report.alike import optimizer_differences, placebo
from wellposed_lab.report.extra_sections import extra_sections
from wellposed_lab.report.html_table import Cell, Column, Table
from wellposed_lab.report.metric_words import metric_words
from wellposed_lab.report.runs import ExcludedRun, FoundRuns, Run, find_runs

FEW = 3
"""Most variants that a sentence lists by name."""
TEST = ("mean_difference", "pairs", "p_value", "p_holm", "significant", "higher_is_better")
"""Columns of a test in a record."""
SUMMARY = ("mean", "standard_error")


@dataclass(frozen=True)
class Summary:
    """Mean, standard error (``None`` for one seed) and the values, one per seed."""

    mean: float
    standard_error: float | None
    values: tuple[float, ...]

    def __str__(self) -> str:
        if self.standard_error is None:
            return format_number(self.mean)
        return f"{format_number(self.mean)} ± {format_number(self.standard_error, 2)}"


@dataclass(frozen=True)
class VariantResult:
    """One variant on one task: finished ``seeds`` are in ``metrics``, ``failed`` ones have no
    number.

    ``learned`` says whether the mean beats the reference by the margin; ``None`` without a
    reference or a finished seed.
    """

    variant: str
    seeds: tuple[int, ...]
    metrics: Mapping[str, Summary]
    learned: bool | None
    comparison: statistics.PairedComparison | None
    failed: tuple[int, ...] = ()
    comparisons: Mapping[str, statistics.PairedComparison] = field(default_factory=dict)
    """Tests by metric; p is corrected for the number of variants, not of metrics."""
    unlike: tuple[str, ...] = ()
    """Options of the optimizer that differ from the first variant's, as phrases."""

    @property
    def not_tuned_alike(self) -> str:
        """A clause on `unlike`, or an empty text."""
        return f"; not tuned alike: {', '.join(self.unlike)}" if self.unlike else ""


@dataclass(frozen=True)
class TaskComparison:
    """All variants of one task; the others are compared with the first one by ``metric``.

    ``runs`` has the finished runs of each variant. A variant has learned if its
    ``reference_metric`` beats ``reference_value``, that of the best constant answer, by more than
    ``margin`` (`statistics.learning_margin`).
    """

    task: str
    metric: str
    higher_is_better: bool
    reference: Mapping[str, float]
    reference_metric: str
    reference_value: float | None
    variants: tuple[VariantResult, ...]
    runs: tuple[tuple[Run, ...], ...]
    notes: tuple[str, ...]
    margin: float = 0.0

    @property
    def metrics(self) -> list[str]:
        """Metrics of any variant, in the order of their first occurrence."""
        return list(dict.fromkeys(name for result in self.variants for name in result.metrics))

    def records(self) -> list[dict[str, Any]]:
        """Return one flat dictionary per variant and metric, with its test."""
        records = []
        for result in self.variants:
            for name, summary in (result.metrics or {self.metric: None}).items():
                test = result.comparisons.get(name)
                judged = name == self.reference_metric
                low, high = (test.interval if test else None) or (None, None)
                records.append(
                    {
                        "task": self.task,
                        "variant": result.variant,
                        "metric": name,
                        "seeds": len(result.seeds),
                        "failed": len(result.failed),
                        **{part: getattr(summary, part, None) for part in SUMMARY},
                        "values": list(getattr(summary, "values", [])),
                        "reference": self.reference_value if judged else None,
                        "learned": result.learned if judged else None,
                        **{column: getattr(test, column, None) for column in TEST},
                        "low": low,
                        "high": high,
                        "verdict": test.verdict if test and name == self.metric else None,
                    }
                )
        return records

    def least_gain(self, metric: str, required: float | None = None) -> float:
        """Return the gain that counts: ``required`` if it is given and ``metric`` is that of the
        task, else a hundredth of the first variant's mean."""
        first = self.variants[0].metrics.get(metric)
        asked = required if metric == self.metric else None
        return asked or (abs(first.mean) / 100 if first else 0.0)

    def worth_verdicts(self, required: float | None = None) -> tuple[str, dict[str, str]]:
        """Return the decision rule, and whether each variant is worth it, for the gain
        `least_gain`. There is no verdict if the first variant did not learn."""
        first, *others = self.variants
        if not others or self.metric not in first.metrics:
            return "", {}

        asked = self.least_gain(self.metric, required)
        verdicts = {}
        rule = f"better in {self.metric} by {asked:.3g} or more (--worth), at p < 0.05"
        for variant in others:
            if first.learned is False:
                verdicts[variant.variant] = f"undecided: {self.unlearned(first)}"
            elif variant.comparison is not None:
                test = variant.comparison
                tests = len(others)
                worth = statistics.worth_it(test, asked, tests=tests)
                verdicts[variant.variant] = worth + variant.not_tuned_alike

        return f"worth it? {rule}; not worth it: the interval of the gain ends below that", verdicts

    def worth(self, required: float | None = None) -> list[str]:
        """Return `worth_verdicts` as lines."""
        rule, verdicts = self.worth_verdicts(required)
        return [rule, *(f"{name}: {text}" for name, text in verdicts.items())] if rule else []

    def unlearned(self, result: VariantResult) -> str:
        """Return why a variant did not learn."""
        mean = format_number(result.metrics[self.reference_metric].mean)
        words = metric_words(self.reference_metric)
        value = format_number(self.reference_value)
        margin = format_number(self.margin, 2)
        return (
            f"{result.variant} did not learn: {words} {mean} is no better than the reference"
            f" {value}, margin {margin}"
        )


@dataclass(frozen=True)
class Comparison:
    """Result of `aggregate`: tasks with their variants, excluded runs, and tasks without a finished run."""

    tasks: tuple[TaskComparison, ...]
    excluded: tuple[ExcludedRun, ...]
    unjudged: tuple[str, ...] = ()

    def table(self) -> str:
        """Return one table per task and the list of excluded runs, as text for a terminal."""
        parts = [*(_task_text(task) for task in self.tasks), *self.remarks()]
        if self.excluded:
            rows = [[str(run.folder), run.status, run.reason] for run in self.excluded]
            parts.append(text_table("Not counted", ["run", "status", "why"], rows, left=3))
        return "\n\n".join(parts)

    def remarks(self) -> list[str]:
        """Return one sentence for each task without a finished run."""
        problem = "no verdict: no run of it finished"
        return [f"{task}: {problem}" for task in self.unjudged]

    def records(self) -> list[dict[str, Any]]:
        """Return one flat dictionary per task, variant and metric; a variant without a finished
        seed has no mean."""
        return [record for task in self.tasks for record in task.records()]

    def to_csv(self, path: str | Path) -> Path:
        """Write `records` as CSV; the values of the seeds are in one cell, separated by spaces."""
        records = self.records()
        return write_csv(Path(path), list(records[0]) if records else ["task"], records)


def aggregate(run_dirs: Sequence[Path]) -> Comparison:
    """Return mean ± standard error over seeds of every metric, and the paired test against the
    first variant.

    Status: exact arithmetic on the numbers of ``result.json``; see `statistics.paired_comparison`
    for the test. Pairs are runs of the same seed, which see the same batches. Only successful runs
    enter a mean; the others are in ``Comparison.excluded``. If a seed has failed on either side,
    there is no verdict (`statistics.compare_seeds`). Runs of one variant with different
    configurations become separate variants, named by their differences.

    Args:
        run_dirs: run folders, or folders that contain run folders.

    Returns:
        `Comparison`, with ``table()`` and ``to_csv(path)``.

    Raises:
        DataError: no run, or a damaged ``result.json``.
        ConfigError: several seeds, and scipy is not installed.

    Cost: reading one small file per run; torch is not imported.

    >>> aggregate([Path("no-such-folder")])
    Traceback (most recent call last):
    ...
    wellposed.errors.DataError: runs cannot be read:
      no-such-folder: does not exist
    """
    return compare_runs(find_runs(run_dirs, needed=not extra_sections(run_dirs)))


def compare_runs(runs: FoundRuns) -> Comparison:
    """Return the comparison of runs that were already read."""
    groups = _by_label(runs.runs, lambda run: run.task, _task_settings)
    judged = [name for name, group in groups.items() if any(run.failure is None for run in group)]
    tasks = tuple(_compare_task(name, groups[name]) for name in judged)
    return Comparison(tasks, runs.excluded, tuple(name for name in groups if name not in judged))


@dataclass(frozen=True)
class _LearnedTest:
    """What decides whether a model has learned: a metric beats a value by a margin."""

    metric: str
    value: float | None
    """Of the best predictor that ignores its input; None if there is none."""
    margin: float
    rises: bool
    """Whether a higher value of the metric is better."""

    def decide(self, metrics: Mapping[str, Summary]) -> bool | None:
        """Return whether the mean beats the value by the margin; None without a value or a seed."""
        if self.value is None or self.metric not in metrics:
            return None
        gain = metrics[self.metric].mean - self.value
        return (gain if self.rises else -gain) > self.margin


def _compare_task(name: str, group_runs: Sequence[Run]) -> TaskComparison:
    runs = [run for run in group_runs if run.failure is None]
    headline = runs[0].headline
    directions = runs[0].result["higher_is_better"]
    if any(run.headline != headline for run in runs):
        raise DataError(
            f"runs of task {name} report different headline metrics; compare runs of one version"
        )

    scores = runs[0].values
    metric = next(m for m in (f"{headline},test", f"{headline},valid", *scores) if m in scores)
    reference, judged, expected = _reference(runs[0])
    has_learned = _learned_test(runs[0], name, judged, expected, otherwise=metric)

    groups = _by_label(group_runs, lambda run: run.variant, _variant_settings)
    tests: dict[str, list[statistics.PairedComparison | None]] = {}
    for column in dict.fromkeys([metric, *(m for run in runs for m in run.values)]):
        kind = column.partition(",")[0].partition("@")[0]
        better = bool(directions.get(kind, True))
        tests[column] = _comparisons(groups, column, needed=column == metric, higher=better)

    finished = [_finished(group) for group in groups.values()]
    first_group = next(iter(groups.values()))
    results: list[VariantResult] = []
    for index, (label, group) in enumerate(groups.items()):
        metrics = _summaries(finished[index])
        learned = has_learned.decide(metrics)
        why = placebo(finished[index], finished[0][0]) if index and finished[0] else ""
        if learned is False and results and results[0].learned is False:
            why = f"neither {results[0].variant} nor {label} learned"

        compared = {name: test for name, column in tests.items() if (test := column[index])}
        if why:
            compared = {
                k: replace(test, obstacle=test.obstacle or why) for k, test in compared.items()
            }
        unlike = optimizer_differences(group[0], first_group[0]) if index else []
        results.append(
            VariantResult(
                variant=label,
                seeds=tuple(run.seed for run in finished[index]),
                metrics=metrics,
                learned=learned,
                comparison=compared.get(metric),
                failed=tuple(sorted(run.seed for run in group if run.failure is not None)),
                comparisons=compared,
                unlike=tuple(unlike),
            )
        )

    return TaskComparison(
        name,
        metric,
        bool(directions.get(headline, True)),
        reference,
        reference_metric=has_learned.metric,
        reference_value=has_learned.value,
        margin=has_learned.margin,
        variants=tuple(results),
        runs=tuple(finished),
        notes=tuple(_notes(results)),
    )


def _learned_test(
    run: Run, task: str, judged: str, expected: float | None, *, otherwise: str
) -> _LearnedTest:
    """Return what decides whether a model of this task has learned: ``judged`` on valid, or on test
    if the answer of train is known there, else the metric ``otherwise``."""
    scores = run.values
    rises = bool(run.result["higher_is_better"].get(judged, True))
    metric = f"{judged},valid" if f"{judged},valid" in scores else otherwise
    if expected is None:
        return _LearnedTest(metric, None, 0.0, rises)

    of_train = (run.result.get("train_reference") or {}).get(f"{judged},test")
    if of_train is not None and f"{judged},test" in scores:
        # Valid chooses the weights, so even a model that learned nothing looks better there.
        metric = f"{judged},test"
        expected = (max if rises else min)(expected, of_train)

    counts = (run.result.get("n-samples") or {}).get(task) or {}
    examples = counts.get(metric.partition(",")[2])
    margin = statistics.learning_margin(expected, examples, share=rises)
    return _LearnedTest(metric, expected, margin, rises)


def _finished(group: Sequence[Run]) -> tuple[Run, ...]:
    """Return the runs that did not fail, by seed."""
    finished = (run for run in group if run.failure is None)
    return tuple(sorted(finished, key=lambda run: run.seed))


def _notes(results: Sequence[VariantResult]) -> Iterator[str]:
    """Yield a line for each variant that is tested on fewer seeds than were trained."""
    for result in results:
        test = result.comparison
        most = max(len(results[0].seeds), len(result.seeds))
        if test and not test.obstacle and test.pairs < most:
            note = f"is tested on the {test.pairs} seeds it shares with the first variant"
            yield f"{result.variant} {note}"


def _reference(run: Run) -> tuple[dict[str, float], str, float | None]:
    """Return the metrics of the best predictor that ignores its input, the metric that decides
    whether a model has learned, and its value.

    Scores of generated text have no reference, so such a task is judged by its loss.
    """
    values = run.result.get("reference") or {}
    reference = {name: float(value) for name, value in values.items() if value is not None}
    only = next(iter(reference.values())) if len(reference) == 1 else None
    by_loss = only is None and "loss" in reference and run.headline not in reference
    judged = "loss" if by_loss else run.headline
    return reference, judged, reference.get(judged, only)


def _summaries(runs: Sequence[Run]) -> dict[str, Summary]:
    """Summarise every metric that all of these runs have."""
    names = [m for m in runs[0].values if all(m in run.values for run in runs)] if runs else []
    values = {m: tuple(float(run.values[m]) for run in runs) for m in names}
    return {m: Summary(*statistics.mean_and_standard_error(v), v) for m, v in values.items()}


def _comparisons(
    groups: Mapping[str, Sequence[Run]], metric: str, *, needed: bool, higher: bool
) -> list[statistics.PairedComparison | None]:
    """Return the test of each variant against the first by a metric, corrected for the number of tests."""
    sides = []
    for variant, group in groups.items():
        done = [run for run in group if run.failure is None]
        for run in done:
            if needed and metric not in run.values:
                raise DataError(
                    f"{run.folder / 'result.json'}: lacks {metric!r}, which other runs of"
                    f" {run.task} report"
                )
        values = {run.seed: run.values[metric] for run in done if metric in run.values}
        failures = {run.seed: run.failure for run in group if run.failure is not None}
        sides.append(statistics.SeedResults(variant, values, failures))

    tests = [
        statistics.compare_seeds(side, sides[0], higher_is_better=higher) for side in sides[1:]
    ]
    return [None, *statistics.holm_correction(tests)]


def _by_label(runs: Sequence[Run], label: Any, settings: Any) -> dict[str, list[Run]]:
    """Group by label; if runs of one label have different settings, name each group by as few of
    them as distinguish it, with ``...`` for the others."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        key = json.dumps(settings(run), sort_keys=True, default=str)
        groups.setdefault((label(run), key), []).append(run)

    named: dict[str, list[Run]] = {}
    for (name, _), group in groups.items():
        rivals = [settings(other[0]) for (label, _), other in groups.items() if label == name]
        mine = settings(group[0])
        keys = sorted({key for rival in rivals for key in rival})
        values = {key: [str(rival.get(key)) for rival in rivals] for key in keys}
        different = [key for key in keys if len({*values[key]}) > 1]
        # The setting with most values first, and of those the one with the shortest text.
        different.sort(key=lambda key: (-len({*values[key]}), max(map(len, values[key]))))
        named_by = []
        texts = [""] * len(rivals)
        while len(named_by) < len(different) and len({*texts}) < len(rivals):
            key = different[len(named_by)]
            named_by.append(f"{key.rpartition('.')[2]}={mine.get(key)}")
            texts = [f"{text}, {value}" for text, value in zip(texts, values[key], strict=True)]
        suffix = ", ".join(named_by + ["..."] * (len(named_by) < len(different)))
        named[f"{name} ({suffix})" if suffix else name] = group

    return named


# Windows change how texts are read, not the texts.
_WINDOWS = "certified_windows"


def _task_settings(run: Run) -> dict[str, Any]:
    settings = flat_options(run.result["config"].get("task_options") or {})
    settings.pop(_WINDOWS, None)
    return settings


def _variant_settings(run: Run) -> dict[str, Any]:
    config = run.result["config"]
    apart = ("task", "task_options", "variant")
    options = config.get("task_options") or {}
    if _WINDOWS in options:
        config = {_WINDOWS: options[_WINDOWS], **config}
    settings = flat_options({key: value for key, value in config.items() if key not in apart})
    settings.pop("train.seed", None)
    return settings


def results_table(task: TaskComparison, name: str = "results") -> Table:
    """Return the means of every variant on *test*, and its test against the first variant."""
    words = metric_words(task.metric)
    direction = "higher" if task.higher_is_better else "lower"
    caption = f"{words[0].upper()}{words[1:]}: {direction} is better; mean ± standard error"
    if task.reference_value is not None:
        value = format_number(task.reference_value)
        margin = format_number(task.margin, 2)
        caption += f"; learned: {task.reference_metric} better than {value} by {margin}"

    headings = dict.fromkeys([task.metric, *(m for m in task.metrics if m.endswith(",test"))])
    learned = {None: None, True: "yes", False: Cell("no", "no", "bad")}
    rows = []
    for result in task.variants:
        test = result.comparison
        every = len(result.seeds) + len(result.failed)
        seeds = f"{len(result.seeds)} of {every}" if result.failed else str(every)
        difference = getattr(test, "mean_difference", None)
        rows.append(
            {
                "variant": result.variant,
                "seeds": Cell(seeds, seeds, "bad" if result.failed else ""),
                **{metric: Cell(mean.mean, str(mean)) for metric, mean in result.metrics.items()},
                "difference": difference and Cell(difference, f"{difference:+.4g}"),
                "p": getattr(test, "p_value", None),
                "p_holm": getattr(test, "p_holm", None),
                "learned": learned[result.learned],
            }
        )

    columns = [
        Column("variant", "variant", "text"),
        Column("seeds", "seeds", "text"),
        *(Column(metric, metric_words(metric)) for metric in headings),
        Column("difference", f"difference from {task.variants[0].variant}"),
        Column("p", "p", digits=3),
        Column("p_holm", "p (Holm)", digits=3),
        Column("learned", "learned", "text"),
    ]

    return Table(name, caption, columns, rows)


def _task_text(task: TaskComparison) -> str:
    """Return the table of one task for a terminal, with its verdicts and notes."""
    table = results_table(task)
    first, *others = task.variants
    rows = [[cell.text for cell in row] for row in table.body]
    headings = [column.heading for column in table.headings]
    verdicts = ((rival.variant, rival.comparison.verdict) for rival in others if rival.comparison)
    unlike = {rival.variant: rival.not_tuned_alike for rival in others}
    lines = [
        f"{variant} against {first.variant}: {verdict}{unlike[variant]}"
        for variant, verdict in verdicts
    ]
    lines += [f"note: {note}" for note in task.notes]
    return "\n".join([text_table(f"{task.task}: {table.caption}", headings, rows), *lines])


def verdict(task: TaskComparison) -> str:
    """Return one sentence on all variants: better or worse than the first, or undecided."""
    first, *others = task.variants
    words = metric_words(task.metric)
    if not others:
        return f"One variant: nothing to compare with. {words}: {first.metrics[task.metric]}"

    sides: dict[str, list[str]] = {}
    for result in others:
        test = result.comparison
        side = f"no significant difference from {first.variant}"
        if test is None or test.obstacle or test.mean_difference is None:
            side = "undecided"
        elif test.p_holm is None:
            side = f"no test against {first.variant}"
        elif test.significant:
            gains = (test.mean_difference > 0) is task.higher_is_better
            side = f"{'better' if gains else 'worse'} than {first.variant}"
        sides.setdefault(side, []).append(result.variant)

    parts = []
    for side, names in sorted(sides.items()):
        every = "all " if len(names) == len(others) else ""
        some = ", ".join(names) if len(names) <= FEW else f"{every}{len(names)} variants"
        parts.append(f"{some}: {side}")

    unlike = [result.variant for result in others if result.unlike]
    few = ", ".join(unlike) if len(unlike) <= FEW else f"{len(unlike)} variants"
    parts += [f"not tuned alike: {few}"] if unlike else []
    return f"By {words}, {'; '.join(parts)}"


def distinct_metrics(task: TaskComparison) -> list[str]:
    """Return the metric of the task and those of *test*; of metrics that are multiples of each
    other, the first."""
    metrics: dict[tuple[float, ...], str] = {}
    for metric in [task.metric, *(name for name in task.metrics if name.endswith(",test"))]:
        every = [v for r in task.variants if metric in r.metrics for v in r.metrics[metric].values]
        metrics.setdefault(tuple(round(v / (every[0] or 1.0), 9) for v in every), metric)
    return list(metrics.values())
