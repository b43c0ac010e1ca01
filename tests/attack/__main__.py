"""``python -m tests.attack --minutes N``: attack random compositions and print the largest ratio of
every rule."""

import argparse
import sys
import time
from pathlib import Path

import torch

from .compositions import draw
from .measure import attacked, certified
from .table import Table


def main(words):
    """Return 1 where a certificate was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    for name, kind, default, text in (
        ("--minutes", float, 1.0, "how long to go on (interrupt for the table so far)"),
        ("--seed", int, 0, "of the run; a case has its own number besides"),
        ("--case", int, None, "run this case alone and show it"),
        ("--out", Path, None, "write the table to this file as well"),
    ):
        parser.add_argument(name, type=kind, default=default, help=text)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    if options.case is not None:
        return _one(options.seed, options.case)
    table = _until(time.monotonic() + 60 * options.minutes, options.seed)
    print(table.markdown())
    if options.out is not None:
        options.out.write_text(table.markdown() + "\n", encoding="utf-8")
    return 1 if table.violations else 0


def _one(seed, number):
    case = draw(seed, number)
    outcome = attacked(case)
    print(case.module, f"scales of the inputs {case.scales}, bound of the weights drawn "
          f"{certified(case, case.module):.6g}", outcome, sep="\n")  # fmt: skip
    return 1 if outcome.violates else 0


def _until(end, seed):
    table, told = Table(), time.monotonic()
    try:
        while time.monotonic() < end:
            table.outcomes.append(attacked(draw(seed, len(table.outcomes))))
            if table.outcomes[-1].violates:
                print(f"VIOLATION {table.outcomes[-1]}", file=sys.stderr)
            if time.monotonic() > told + 60:
                told = time.monotonic()
                print(table.progress(), file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
