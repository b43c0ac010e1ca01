"""What the processes of test_workers.py do, which spawned ones import by its name; run as a script,
a parent of two.

``python worker_jobs.py FOLDER``
"""

import os
import signal
import sys
import time
from pathlib import Path

from wellposed.errors import DataError
from wellposed_lab.compare.runs import Workers


def one_of_two(folder, turn, way, stop):
    """Fail in the first process ``way``; the second waits until it is asked to stop, or else works
    to its end."""
    with turn.get_lock():
        turn.value += 1
        first = turn.value == 1
    if first and way == "error":
        raise DataError("row 7: no label")
    if first:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + (200 if way == "error" else 0.5)
    while not stop() and time.monotonic() < deadline:
        time.sleep(0.02)
    (folder / way).write_text("stopped" if stop() else "finished")


def wait_for_stop(folder, stop):
    """Say that this process is at work, and how its work ended."""
    mine = folder / str(os.getpid())
    mine.write_text("at work")
    while not stop():
        time.sleep(0.02)
    mine.write_text("stopped")


if __name__ == "__main__":
    with Workers(2, wait_for_stop, Path(sys.argv[1])) as workers:
        while workers.at_work():
            pass
