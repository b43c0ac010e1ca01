"""Train a grid of runs, in one or several processes that stop together. Free of torch."""

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
"""Seconds that processes have to end after an error here, before they are killed."""
SPAWN = multiprocessing.get_context("spawn")


class PlannedRun(NamedTuple):
    """One run of a grid: its folder, label and configuration."""

    folder: Path
    label: str
    config: RunConfig


def say_nothing(line: str) -> None:
    """Ignore a line of progress."""
    del line


def train_planned(
    planned: Iterable[PlannedRun],
    *,
    announce: Callable[[str], None],
    task: Task | None = None,
    tasks: dict[str, Task] | None = None,
    jobs: int = 1,
    **settings: Any,
) -> Iterator[RunResult]:
    """Train every run and yield how each ended, in order, until one is cancelled; finished ones are
    kept.

    Several processes give the same weights as one: bit for bit on a CPU with equal threads.

    Args:
        planned: The runs; neighbours with the same task share its data.
        announce: Called with the label of each run before it starts.
        task: The task of all runs; default: `build_task` of each configuration, in each process.
        tasks: Cache of `task_of`, filled as needed, so that a process reads data once.
        jobs: Number of processes; each gets a share of the threads and shows no progress bar.
        **settings: Keywords of `wellposed_lab.training.loop.train.train`; defaults:
            ``resume="auto"``, ``progress=False``.

    Raises:
        WellposedError: an error of one run, which stops the others.
        KeyboardInterrupt: a signal asked to stop as a run ended.
    """
    from wellposed_lab.training.loop.train import train

    check_jobs(jobs)
    settings = {"resume": "auto", "progress": False, **settings}
    if jobs > 1:
        settings |= {"progress": False, "tasks": None if tasks is None else {}}
        yield from _train_together(jobs, list(planned), announce, settings)
        return
    built: dict[str, Task] = {} if tasks is None else tasks
    for folder, label, config in planned:
        announce(label)
        with StopRequest() as stop:
            read = task or task_of(config, built, others=tasks is not None)
            result = train(config, folder, task=read, **settings)
        yield result
        if result.status == "cancelled":
            return
        if stop.requested:  # too late to cancel this run
            raise KeyboardInterrupt


def task_of(config: RunConfig, built: dict[str, Task], *, others: bool = True) -> Task:
    """Return the task of a run from ``built``, or build it; unless ``others``, empty that first."""
    from wellposed_lab.tasks.task import build_task

    reads = repr((config.task, sorted(config.task_options.items())))
    if reads not in built:
        if not others:
            built.clear()
        built[reads] = build_task(config.task, config.task_options)
    return built[reads]


def _train_together(
    jobs: int, planned: Sequence[PlannedRun], announce: Callable[[str], None], settings: Any
) -> Iterator[RunResult]:
    """Train in processes that each take the next run until none is left. They stop when this
    process is asked to, or after an error in one, which is raised here. If one dies (of memory), an
    error is raised when the others have finished."""
    from wellposed_lab.training.folder.result import read_result

    shared = Shared(
        planned,
        settings,
        begun=SPAWN.Value("i", 0),
        ended=SPAWN.Array("b", len(planned)),
        errors=SPAWN.SimpleQueue(),
    )
    announced = started = 0

    def results() -> Iterator[RunResult]:
        nonlocal started
        while started < len(planned) and shared.ended[started]:
            started += 1
            yield from filter(None, [read_result(planned[started - 1].folder)])

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
    broken = [str(worker.exitcode) for worker in workers if worker.exitcode]
    if broken:
        raise WellposedError(
            f"{len(broken)} of {len(workers)} processes ended with exit status {', '.join(broken)};"
            " their messages are above; --resume auto continues the remaining runs"
        )


class Shared(NamedTuple):
    """Shared by the processes of a grid: runs, settings, number begun, which ended, errors."""

    planned: Sequence[PlannedRun]
    settings: dict[str, Any]
    begun: Any
    ended: Any
    errors: Any


@contextmanager
def _workers(jobs: int, shared: Shared) -> Iterator[list[Any]]:
    """Start the processes. At the end, stop those still at work and leave none behind."""
    arguments = (jobs, list(imported_files()), shared)
    workers = [SPAWN.Process(target=_work, args=arguments) for _ in shared.planned[:jobs]]
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
                number = shared.begun.value
                shared.begun.value = shared.begun.value + 1
            if number >= len(shared.planned):
                return
            yield shared.planned[number]

    for asked in STOPPING:  # a terminal signals the whole group; the parent passes it on
        if asked != signal.SIGTERM:
            signal.signal(asked, signal.SIG_IGN)
    with StopRequest() as stop:
        threading.Thread(target=_end_with_parent, daemon=True).start()
        try:
            import torch

            torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
            for name in files:
                import_file(Path(name))
            for _ in train_planned(next_runs(), announce=say_nothing, **shared.settings):
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
    """Refuse a number of processes below 1, or above 1 under a launcher, by a `ConfigError`."""
    if jobs < 1:
        raise ConfigError(f"jobs = {jobs!r}, expected at least 1")
    if jobs > 1 and is_one_of_several():
        launcher = "torchrun or accelerate launch, whose processes train each run together"
        raise ConfigError(f"jobs = {jobs} under {launcher}; give one of the two")
