"""Run by test_signals.py: train, kill -9 at each of the last renames, resume; print how the files compare.

Each run is a process of its own, forked from this one once the imports are done; this one never
trains.
"""

import itertools
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

from tools.faults.harness import fork, import_everything, run, wait
from tools.faults.kills import differences
from tools.faults.toys import copied, leaves, write_data

from wellposed_lab.cli.main import main


def killed_at_rename(words, number, is_after):
    """Run a command and die just before or after the rename with this number, counted from 0."""
    rename = Path.replace
    count = itertools.count()

    def replace(path, target):
        here = next(count) == number
        if here and not is_after:
            os.kill(os.getpid(), signal.SIGKILL)
        renamed = rename(path, target)
        if here:
            os.kill(os.getpid(), signal.SIGKILL)
        return renamed

    Path.replace = replace
    return main(words)


def outcomes(folder):
    """Kill a run that ends, before and after each rename; every start has the last ones alone to
    do."""
    toys = write_data(folder)
    log = folder / "log"
    uninterrupted = folder / "whole" / "run"
    toys.make(toys.train(uninterrupted))
    expected = leaves(uninterrupted)
    results = []
    for name in ("result.json", "manifest.json"):
        (uninterrupted / name).unlink()
    for moment in itertools.count():
        out = copied(uninterrupted, folder / "out" / "run")
        words = toys.train(out)
        killed = wait(fork(partial(killed_at_rename, words, *divmod(moment, 2)), log), 300)
        if killed == 0:
            break
        again = run(words, log, 300)
        litter = [path.name for path in out.iterdir() if path.name.startswith(".")]
        outcome = {"killed": killed, "resumed": again.status, "litter": litter}
        results.append({**outcome, "different": differences(expected, leaves(out))})
    return results


if __name__ == "__main__":
    import_everything()
    print(json.dumps(outcomes(Path(sys.argv[1]))))
