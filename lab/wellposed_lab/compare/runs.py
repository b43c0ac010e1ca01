"""A grid of runs, trained one after the other, or several at a time in processes that are started
together, asked to stop together, and never left behind; free of torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from wellposed.errors import ConfigError, WellposedError
from wellposed_lab.plugins import import_file, imported_files
from wellposed_lab.training.config import RunConfig
from wellposed_lab.training.loop.processes import Cancelled, StopRequest, is_one_of_several

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
    from wellposed_lab.training.folder.result import read_result

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
    if workers.stopped:
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


class Workers:
    """A context in which ``jobs`` processes call ``work(*arguments, stop)``, each with its share of
    the threads.

    ``work`` is a function at the top of a module; ``stop()`` tells whether it shall come to an end.
    It does when this process is asked to stop (a second time ends all at once), when another worker
    met an error, which is raised here, and when this process is gone in whatever way. Where a
    worker is gone, such as one killed for its memory, the others finish their work before an error
    says so.
    """

    def __init__(self, jobs: int, work: Callable[..., None], *arguments: Any) -> None:
        self._request = StopRequest()
        self._asked = False
        self._errors: list[BaseException] = []
        self._arguments = arguments  # shared numbers among them end with the last reference here
        self._jobs, self._work = jobs, work
        self._processes: list[Any] = []
        self._ends: list[Connection] = []

    def __enter__(self) -> Workers:
        self._request.__enter__()
        try:
            with _terminal_signals_blocked():
                for _ in range(self._jobs):
                    mine, theirs = SPAWN.Pipe()
                    given = (theirs, self._jobs, imported_files(), self._work, self._arguments)
                    process = SPAWN.Process(target=_worker, args=given)
                    process.start()
                    theirs.close()  # so that the end here closes with its process
                    self._processes.append(process)
                    self._ends.append(mine)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    @property
    def stopped(self) -> bool:
        """Whether this process was asked to stop."""
        return self._request.requested

    def at_work(self) -> bool:
        """Wait a moment; return whether any process is still at work."""
        for end in wait(self._ends, timeout=0.1):
            assert isinstance(end, Connection)
            try:
                self._errors.append(end.recv())
            except (EOFError, ConnectionResetError):
                self._ends.remove(end)
        if self._request.requested or self._errors:
            self._stop()
        return bool(self._ends)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                while self.at_work():
                    pass
            elif not isinstance(error, KeyboardInterrupt):
                self._stop()
                for process in self._processes:
                    process.join(PATIENCE)
        finally:
            for process in self._processes:
                if error is not None:
                    process.kill()
                process.join()
            self._request.__exit__(kind, error, trace)
        if error is None and self._errors:
            raise self._errors[0]
        broken = [str(process.exitcode) for process in self._processes if process.exitcode]
        if error is None and broken and not self._asked:
            count = f"{len(broken)} of {len(self._processes)} processes"
            raise WellposedError(
                f"{count} ended with exit status {', '.join(broken)}; their messages are above;"
                " --resume auto goes on with what is left"
            )

    def _stop(self) -> None:
        if not self._asked:
            self._asked = True
            for end in self._ends:
                with suppress(OSError):  # it is gone
                    end.send("stop")


@contextmanager
def _terminal_signals_blocked() -> Iterator[None]:
    """Start worker processes with Ctrl-C and hang-up blocked: a terminal sends both to the whole
    group, and this process alone passes them on."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _worker(
    end: Connection,
    jobs: int,
    files: Mapping[str, str],
    work: Callable[..., None],
    arguments: Sequence[Any],
) -> None:
    with StopRequest() as request:
        threading.Thread(target=_wait_for_stop, args=(end, request), daemon=True).start()
        try:
            import torch

            torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
            for name in files:
                import_file(Path(name))
            work(*arguments, lambda: request.requested)
        except (Cancelled, KeyboardInterrupt):
            pass
        except (WellposedError, OSError) as error:
            end.send(error)
            sys.exit(1)


def _wait_for_stop(end: Connection, request: StopRequest) -> None:
    with suppress(EOFError, OSError):  # the parent is gone
        end.recv()
    if not request.requested:
        os.kill(os.getpid(), signal.SIGTERM)
