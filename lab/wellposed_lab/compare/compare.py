"""Train several variants on the same batches, seed by seed, and test whether they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellposed.call_checks import checked_arguments
from wellposed.errors import ConfigError, shortened
from wellposed.finite_json import to_json
from wellposed.options import Count, Size
from wellposed_lab.compare import rates
from wellposed_lab.compare.runs import PlannedRun, check_jobs, say_nothing, task_of, train_planned
from wellposed_lab.compare.variants import apply_variant, check_options, variant_folder
from wellposed_lab.report.runs import ORDER_FILE, TUNED, rate_notes
from wellposed_lab.tasks.data.remarks import data_remarks
from wellposed_lab.training.certified.record import CERTIFIED_KINDS
from wellposed_lab.training.config import RunConfig
from wellposed_lab.training.folder.atomic import replace_file
from wellposed_lab.training.folder.run_folder import check_name
from wellposed_lab.training.loop.processes import is_first
from wellposed_lab.training.loop.tracking import check_trackers

if TYPE_CHECKING:
    from wellposed_lab.tasks.task import Task
    from wellposed_lab.training.folder.result import RunResult


@dataclass(frozen=True)
class ComparisonRuns:
    """How each run of a comparison ended."""

    results: tuple[RunResult, ...]

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(result.out for result in self.results)

    @property
    def cancelled(self) -> bool:
        """Whether the user stopped the comparison."""
        return any(result.status == "cancelled" for result in self.results)

    @property
    def failed(self) -> tuple[Path, ...]:
        """Folders of the runs that did not finish."""
        return tuple(result.out for result in self.results if result.status == "failed")


@checked_arguments
def compare(
    base: RunConfig,
    variants: Sequence[str],
    *,
    seeds: Size,
    out: Path,
    jobs: int = 1,
    resume: str = "never",
    progress: bool = True,
    command: list[str] | None = None,
    announce: Callable[[str], None] | None = None,
    certify: Count = 0,
    tracking: Sequence[str] = (),
    learning_rates: rates.Rates = (),
) -> ComparisonRuns:
    """Train every variant with every seed; all variants of a seed see the same batches in order.

    Status: exact (the order of examples depends only on the seed). Run ``(v, k)`` is the folder
    ``out/v/seed-k``. A run that diverges is recorded as failed and the others continue. Under a
    launcher, its processes train each run together, one run after the other.

    Args:
        base: Configuration of all variants; its ``train.seed`` is the first seed.
        variants: Names, ``name:value`` for one with a number or a text; the first is the baseline.
        seeds: Number of seeds, at least 1; fewer than 2 give no test.
        out: Folder of the comparison.
        jobs: Runs that train at the same time, as in `train_planned`.
        resume: ``"never"``, or ``"auto"``: keep finished runs and continue the others.
        progress: Draw a progress bar (plain lines when the output is piped).
        command: The words of the command, for the report.
        announce: Called with one line before each run.
        certify: Measure certified and attacked accuracy of every run on this many examples of
            *test*. Runs of windows are skipped and announced: they are certified only in words.
        tracking: Names of trackers, as in `wellposed_lab.training.loop.train.train`.
        learning_rates: Two or more, which variants multiply as the base's. Every variant trains
            with each and the first seed, in ``out/rates/VARIANT/RATE``, and is compared at its best
            on *valid*, by the headline metric. ``"auto"``: a third, one and three times the base's,
            on a third of the steps, and up to two further ones while the best is at an end; not
            below 30 steps, which is announced.

    Returns:
        The run folders and results, seed by seed in the order of ``variants``.

    Raises:
        ConfigError: Before any training: no or repeated variants, options that a variant would
            drop, bad numbers or task options, ``out`` in use without resume. Also ``certify`` for
            tasks other than classification and language modelling.
        DataError: the data of the task cannot be read.

    Cost: ``seeds x len(variants)`` trainings, and ``(len(learning_rates) - 1) x len(variants)`` to
    choose rates; ``"auto"``: 1 to 5 / 3 more for each variant. Each job reads the data once for each
    way of reading it.
    """
    announce_line = announce or say_nothing
    check_trackers(tracking)
    search, left_out = rates.search_of(base, learning_rates)
    _check_names(variants)
    for line in check_options(base, variants):
        announce_line(line)
    configs = _configurations(base, variants, seeds)
    check_jobs(jobs)
    check_name(out)
    if is_first() and resume == "never":
        _check_empty(out)
    built: dict[str, Task] = {}
    tasks = {config.variant: task_of(config, built) for config in configs}
    task = tasks[variants[0]]
    from wellposed_lab.training.loop.build import check_models

    check_models((config, tasks[config.variant]) for config in configs[: len(variants)])
    if certify and task.kind not in CERTIFIED_KINDS:
        raise ConfigError(
            f"certify = {certify} on {base.task}: certified accuracy is defined for a task that"
            " classifies texts or pairs, or predicts the next token; leave it 0"
        )
    if is_first():
        out.mkdir(parents=True, exist_ok=True)
        # Before the first run, so that the report on a killed comparison knows the baseline.
        replace_file(out / ORDER_FILE, to_json({"variants": list(variants)}, indent=2))
    _announce_data(built.values(), announce_line)
    if left_out:
        announce_line(f"learning rates: not searched, as {left_out}")
    settings: dict[str, Any] = {
        "resume": resume, "progress": progress, "command": command, "tracking": tracking,
        "announce": announce_line, "tasks": built, "jobs": jobs,
    }  # fmt: skip
    if search is not None:
        ended, best = _tuned(base, variants, search, out, settings)
        if ended[-1].status == "cancelled":
            return ComparisonRuns(ended)
        configs = _configurations(base, variants, seeds, best)
        settings["resume"] = "auto"
    planned = [
        PlannedRun(
            out / variant_folder(config.variant) / f"seed-{config.train.seed}",
            f"[{number}/{len(configs)}] {config.task} {config.variant} seed {config.train.seed}",
            config,
        )
        for number, config in enumerate(configs, start=1)
    ]
    runs = ComparisonRuns(tuple(train_planned(planned, **settings)))
    if certify and is_first() and not runs.cancelled:
        _certify(configs, runs, tasks, certify, announce_line)
    return runs


def _certify(
    configs: Sequence[RunConfig],
    runs: ComparisonRuns,
    tasks: Mapping[str, Task],
    examples: int,
    announce: Callable[[str], None],
) -> None:
    """Measure certified and attacked accuracy of the runs that finished."""
    from wellposed_lab.training.certified.run import certify_runs

    for name, task in tasks.items():
        ended = zip(configs, runs.results, strict=True)
        ended = [result for config, result in ended if config.variant == name]
        finished = [result.out for result in ended if result.status == "success"]
        if getattr(task, "windows", None):
            announce(
                f"{name}: windows are certified only in words, by wellposed certify RUN --words"
            )
        else:
            certify_runs(finished, task, examples=examples, announce=announce)


def _check_empty(out: Path) -> None:
    """Refuse a folder with files of another comparison."""
    files = (path for path in out.rglob("*") if path.is_file() and path != out / ORDER_FILE)
    if any(files):
        advice = "name another --out, or give --resume auto to keep finished runs and continue"
        raise ConfigError(f"{out}: the folder is not empty; {advice}")


def _announce_data(tasks: Iterable[Task], announce: Callable[[str], None]) -> None:
    remarks = [line for task in tasks for line in data_remarks(task.description())]
    for line in dict.fromkeys(remarks):
        announce(line)


def _tuned(
    base: RunConfig, variants: Sequence[str], search: rates.Search, out: Path, settings: Any
) -> tuple[tuple[RunResult, ...], dict[str, float]]:
    """Train the runs that choose rates; return their results and the rate of each variant."""
    ended: tuple[RunResult, ...] = ()
    tried: dict[str, dict[float, RunResult]] = {name: {} for name in variants}
    wanted = [(name, rate) for name in variants for rate in search.rates]
    while wanted:
        trials = tuple(train_planned(rates.rate_runs(base, wanted, search, out), **settings))
        ended += trials
        if ended[-1].status == "cancelled":
            return ended, {}
        for (name, rate), trial in zip(wanted, trials, strict=True):
            tried[name][rate] = trial
        wanted = rates.rates_beyond(tried, search)

    rows = rates.chosen_rates(tried)
    for line in rate_notes(rows):
        settings["announce"](line)
    if is_first():
        replace_file(
            out / ORDER_FILE, to_json({"variants": list(variants), "rates": rows}, indent=2)
        )
        if search.shorter == 1:
            rates.reuse_first_seed(out, rows, base.train.seed)
    return ended, {row["variant"]: row["rate"] for row in rows if row["chosen"]}


def _check_names(variants: Sequence[str]) -> None:
    twice = [name for name, count in Counter(variants).items() if count > 1]
    if twice or not variants:
        problem = f"{shortened(twice)} named twice" if twice else "none is named"
        raise ConfigError(f"variants: {problem}, expected different names, at least one")
    if TUNED in map(variant_folder, variants):
        raise ConfigError(
            f"variants: {TUNED} is the folder of the runs that choose rates; rename it"
        )


def _configurations(
    base: RunConfig, variants: Sequence[str], seeds: int, best: Mapping[str, float] | None = None
) -> list[RunConfig]:
    """Return the configurations seed by seed, with the ``best`` learning rate of each variant."""
    bases = {name: rates.at_rate(base, rate) for name, rate in (best or {}).items()}
    first = base.train.seed
    return [
        replace(config, train=replace(config.train, seed=seed))
        for seed in range(first, first + seeds)
        for config in (apply_variant(name, bases.get(name, base)) for name in variants)
    ]
