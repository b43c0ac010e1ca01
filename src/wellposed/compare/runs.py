"""A grid of runs, trained one after the other or several at a time; free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from wellposed.compare.workers import SPAWN, Workers, check_jobs
from wellposed.training.config import RunConfig

if TYPE_CHECKING:
    from wellposed.tasks import Task
    from wellposed.training import RunResult


class PlannedRun(NamedTuple):
    """One point of a grid: the folder of its run, what to call it, and what to train."""

    folder: Path
    label: str
    config: RunConfig


def say_nothing(line: str) -> None:
    """Take a line of progress that nobody reads."""
    del line


def train_planned(
    planned: Iterable[PlannedRun],
    *,
    announce: Callable[[str], None],
    task: Task | None = None,
    jobs: int = 1,
    **how: Any,
) -> Iterator[RunResult]:
    """Train every run and yield how each ended, in order, until one is cancelled; finished runs are
    not repeated.

    Several processes leave the same weights as one, bit for bit on a CPU where each has as many
    threads as the one.

    Args:
        planned: the runs; neighbours with the same task share its data.
        announce: called with the label of each run before it.
        task: of all runs, as `build_task` makes it of each configuration; built so where not given,
            and by each of several processes.
        jobs: train so many at the same time, each in a process of its own, with its share of the
            threads and without a progress bar.
        how: keywords of `wellposed.training.train`; where not given, ``resume="auto"`` and
            ``progress=False``.

    Raises:
        WellposedError: what one of them raised, which stops the others.
    """
    from wellposed.tasks import build_task
    from wellposed.training import train

    check_jobs(jobs)
    how = {"resume": "auto", "progress": False, **how}
    if jobs > 1:
        yield from _train_together(jobs, list(planned), announce, {**how, "progress": False})
        return
    given, read_for = task is not None, None
    for folder, label, config in planned:
        announce(label)
        data = (config.task, config.task_options)
        if not given and data != read_for:
            task, read_for = build_task(*data), data
        result = train(config, folder, task=task, **how)
        yield result
        if result.status == "cancelled":
            return


def _train_together(
    jobs: int, planned: Sequence[PlannedRun], announce: Callable[[str], None], how: dict[str, Any]
) -> Iterator[RunResult]:
    from wellposed.training import read_result

    begun, ended = SPAWN.Value("i", 0), SPAWN.Array("b", len(planned))
    announced = given = 0
    shared = (planned, begun, ended, how)
    with Workers(min(jobs, len(planned)), _train_in_turn, *shared) as workers:
        at_work = True
        while at_work:
            at_work = workers.at_work()
            last = min(begun.value, len(planned))
            for run in planned[announced:last]:
                announce(run.label)
            announced = last
            while given < len(planned) and ended[given]:
                result = read_result(planned[given].folder)
                given += 1
                if result is not None:
                    yield result
                    if result.status == "cancelled":
                        return
    if workers.stopped and given < len(planned):
        raise KeyboardInterrupt


def _train_in_turn(
    planned: Sequence[PlannedRun], begun: Any, ended: Any, how: Any, stop: Callable[[], bool]
) -> None:
    """Train the next run that nobody has begun, until none is left."""
    number = 0

    def next_runs() -> Iterator[PlannedRun]:
        nonlocal number
        while not stop():
            with begun.get_lock():
                number, begun.value = begun.value, begun.value + 1
            if number >= len(planned):
                return
            yield planned[number]

    for _ in train_planned(next_runs(), announce=say_nothing, **how):
        ended[number] = 1
