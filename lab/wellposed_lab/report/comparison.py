"""The comparison of runs by task: means over seeds, tests against the first variant, and its words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wellposed.measurement import write_csv
from wellposed.text_table import format_number, text_table
from wellposed_lab import statistics
from wellposed_lab.report.html_table import Cell, Column, Table
from wellposed_lab.report.metric_words import metric_words
from wellposed_lab.report.runs import ExcludedRun, Run

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
