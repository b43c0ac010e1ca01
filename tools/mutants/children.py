"""Work in forked children: what the parent has imported costs them nothing, and what they break
stays theirs."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

MEMORY = 16 * 2**30
# Processor time decides, so that a busy machine changes no verdict; who sleeps ends after this many
# times as long.
PATIENCE = 10


def in_child(work: Callable[[Any], Any], job: Any, allowed: float, answer: Connection) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (int(allowed), int(allowed) + 5))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silent, stream)
    answer.send(json.dumps(work(job)))
    os._exit(0)


def forked(
    work: Callable[[Any], Any], jobs: Iterable[tuple[Any, float]], workers: int
) -> Iterator[tuple[Any, Any, float]]:
    """Yield (job, what `work` returned, seconds) for (job, seconds of processor time allowed), as
    they end.

    The answer of a child that outlives its time or dies is None.
    """
    context = multiprocessing.get_context("fork")
    waiting = iter(jobs)
    running: dict[Connection, tuple[Any, Any, float, float]] = {}
    while True:
        while len(running) < workers and (job := next(waiting, None)) is not None:
            here, there = context.Pipe(duplex=False)
            child = context.Process(target=in_child, args=(work, *job, there))
            child.start()
            there.close()
            running[here] = (job[0], child, time.monotonic(), job[1])
        if not running:
            return
        ready = wait(list(running), timeout=0.2)
        for answer, (job, child, start, allowed) in list(running.items()):
            seconds = time.monotonic() - start
            if answer not in ready and seconds < PATIENCE * allowed:
                continue
            said = None
            if answer in ready:
                with contextlib.suppress(EOFError):
                    said = json.loads(answer.recv())
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.join()
            answer.close()
            del running[answer]
            yield job, said, seconds
