"""Aggregate runs: per task, every variant over its seeds, against the first variant."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wellposed.errors import DataError
from wellposed.options import flat_options
from wellposed_lab import statistics
from wellposed_lab.report.alike import optimizer_differences, placebo
from wellposed_lab.report.comparison import Comparison, Summary, TaskComparison, VariantResult
from wellposed_lab.report.extra_sections import extra_sections
from wellposed_lab.report.runs import FoundRuns, Run, find_runs


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
