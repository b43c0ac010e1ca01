"""A grid of runs, trained one after the other, or several at a time in processes that are started
together, asked to stop together, and never left behind; free of torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from wellposed.errors import ConfigError, WellposedError
from wellposed_lab.plugins import import_file, imported_files
from wellposed_lab.training.config import RunConfig
from wellposed_lab.training.loop.processes import STOPPING, StopRequest, is_one_of_several

if TYPE_CHECKING:
    from wellposed_lab.tasks.task import Task
    from wellposed_lab.training.folder.result import RunResult

PATIENCE = 30.0
"""Seconds in which processes end after an error here, before they are ended."""
SPAWN = multiprocessing.get_context("spawn")


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
    tasks: dict[str, Task] | None = None,
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
        tasks: those that `task_of` has built, which takes the others that the runs need; where
            given, the data is read once for each way of reading it, by each of several processes.
        jobs: train so many at the same time, each in a process of its own, with its share of the
            threads and without a progress bar.
        how: keywords of `wellposed_lab.training.loop.train.train`; where not given, ``resume="auto"`` and
            ``progress=False``.

    Raises:
        WellposedError: what one of them raised, which stops the others.
        KeyboardInterrupt: a signal asked to stop when a run had come to its end.
    """
    from wellposed_lab.training.loop.train import train

    check_jobs(jobs)
    how = {"resume": "auto", "progress": False, **how}
    if jobs > 1:
        how |= {"progress": False, "tasks": None if tasks is None else {}}
        yield from _train_together(jobs, list(planned), announce, how)
        return
    built: dict[str, Task] = {} if tasks is None else tasks
    for folder, label, config in planned:
        announce(label)
        with StopRequest() as stop:
            read = task or task_of(config, built, others=tasks is not None)
            result = train(config, folder, task=read, **how)
        yield result
        if result.status == "cancelled":
            return
        if stop.requested:  # after the last moment at which this run could be cancelled
            raise KeyboardInterrupt


def task_of(config: RunConfig, built: dict[str, Task], *, others: bool = True) -> Task:
    """Return the task of a run from the cache ``built``, building it on first use; the cache is emptied
    before that unless ``others`` stay."""
    from wellposed_lab.tasks.task import build_task

    reads = repr((config.task, sorted(config.task_options.items())))
    if reads not in built:
        if not others:
            built.clear()
        built[reads] = build_task(config.task, config.task_options)
    return built[reads]


def _train_together(
    jobs: int, planned: Sequence[PlannedRun], announce: Callable[[str], None], how: dict[str, Any]
) -> Iterator[RunResult]:
    """Train in processes that take the next run that nobody has begun, until none is left.

    They are asked to stop when this process is, and when one of them met an error, which is raised
    here. Where one is gone, such as one killed for its memory, the others finish their work before
    an error says so.
    """
    from wellposed_lab.training.folder.result import read_result

    numbers = SPAWN.Value("i", 0), SPAWN.Array("b", len(planned))
    shared = Shared(planned, how, *numbers, SPAWN.SimpleQueue())
    announced = given = 0

    def results() -> Iterator[RunResult]:
        nonlocal given
        while given < len(planned) and shared.ended[given]:
            given += 1
            yield from filter(None, [read_result(planned[given - 1].folder)])

    with StopRequest() as stop, _workers(jobs, shared) as workers:
        alive = workers
        while alive and not stop.requested and shared.errors.empty():
            wait([worker.sentinel for worker in alive], timeout=0.1)
            alive = [worker for worker in workers if worker.is_alive()]
            last = min(shared.begun.value, len(planned))
            for run in planned[announced:last]:
                announce(run.label)
            announced = last
            yield from results()
    if not shared.errors.empty():
        raise shared.errors.get()
    for result in results():
        yield result
        if result.status == "cancelled":
            return
    if stop.requested:
        raise KeyboardInterrupt
    if broken := [str(worker.exitcode) for worker in workers if worker.exitcode]:
        raise WellposedError(
            f"{len(broken)} of {len(workers)} processes ended with exit status {', '.join(broken)};"
            " their messages are above; --resume auto goes on with what is left"
        )


class Shared(NamedTuple):
    """What the processes of a grid share: its runs, how they are trained, how many are begun, which have
    ended, and errors."""

    planned: Sequence[PlannedRun]
    how: dict[str, Any]
    begun: Any
    ended: Any
    errors: Any


@contextmanager
def _workers(jobs: int, shared: Shared) -> Iterator[list[Any]]:
    """Start the processes; at the end, ask those that are at work to stop, and leave none behind."""
    given = (jobs, list(imported_files()), shared)
    workers = [SPAWN.Process(target=_work, args=given) for _ in shared.planned[:jobs]]
    try:
        for worker in workers:
            worker.start()
        yield workers
        for worker in filter(SPAWN.Process.is_alive, workers):
            worker.terminate()
        for worker in workers:
            worker.join()
    finally:
        for worker in filter(SPAWN.Process.is_alive, workers):
            worker.terminate()
            worker.join(PATIENCE)
            worker.kill()


def _work(jobs: int, files: Sequence[str], shared: Shared) -> None:
    """Train runs in this process, with its share of the threads, until none is left."""
    number = 0

    def next_runs() -> Iterator[PlannedRun]:
        nonlocal number
        while not stop.requested:
            with shared.begun.get_lock():
                number, shared.begun.value = shared.begun.value, shared.begun.value + 1
            if number >= len(shared.planned):
                return
            yield shared.planned[number]

    for asked in STOPPING:  # a terminal sends some to the whole group; the parent passes them on
        if asked != signal.SIGTERM:
            signal.signal(asked, signal.SIG_IGN)
    with StopRequest() as stop:
        threading.Thread(target=_end_with_parent, daemon=True).start()
        try:
            import torch

            torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
            for name in files:
                import_file(Path(name))
            for _ in train_planned(next_runs(), announce=say_nothing, **shared.how):
                shared.ended[number] = 1
        except KeyboardInterrupt:
            pass
        except (WellposedError, OSError) as error:
            shared.errors.put(error)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def check_jobs(jobs: int) -> None:
    """Refuse a number of processes that cannot be started.

    Raises:
        ConfigError: below 1, or above 1 in a process that a launcher started beside others.
    """
    if jobs < 1:
        raise ConfigError(f"jobs = {jobs!r}, expected at least 1")
    if jobs > 1 and is_one_of_several():
        launcher = "torchrun or accelerate launch, whose processes train each run together"
        raise ConfigError(f"jobs = {jobs} under {launcher}; give one of the two")
