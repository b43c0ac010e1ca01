"""``python -m tests.attack --minutes N``: attack random compositions and print the largest ratio of
every rule."""

import argparse
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field

import torch

from .compositions import draw
from .measure import Outcome, attacked, certified


def main(words):
    """Return 1 where a certificate was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    for name, kind, default, text in (
        ("--minutes", float, 1.0, "how long to go on (interrupt for the table so far)"),
        ("--seed", int, 0, "of the run; a case has its own number besides"),
        ("--case", int, None, "run this case alone and show it"),
    ):
        parser.add_argument(name, type=kind, default=default, help=text)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    if options.case is not None:
        return _one(options.seed, options.case)
    table = _until(time.monotonic() + 60 * options.minutes, options.seed)
    print(table.markdown())
    return 1 if table.violations else 0


def _one(seed, number):
    case = draw(seed, number)
    outcome = attacked(case)
    print(case.module, f"scales of the inputs {case.scales}, bound of the weights drawn "
          f"{certified(case, case.module):.6g}", outcome, sep="\n")  # fmt: skip
    return 1 if outcome.violates else 0


def _until(end, seed):
    table = Table()
    try:
        while time.monotonic() < end:
            table.outcomes.append(attacked(draw(seed, len(table.outcomes))))
            if table.outcomes[-1].violates:
                print(f"VIOLATION {table.outcomes[-1]}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    return table


@dataclass
class Table:
    """Outcomes so far."""

    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def violations(self):
        """Cases whose slope is above their certificate by more than rounding."""
        return [outcome for outcome in self.outcomes if outcome.violates]

    def markdown(self):
        """Return the table, the totals and every violation."""
        alone, inside = defaultdict(list), defaultdict(list)
        for outcome in self.outcomes:
            if outcome.bounded:
                by_name = alone if len(outcome.case.parts) == 1 else inside
                for name in outcome.case.parts:
                    by_name[name].append(outcome)
        lines = [
            "| rule | cases alone | largest | median | worst at | cases in compositions | largest |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [_row(name, alone[name], inside[name]) for name in sorted({*alone, *inside})]
        bounded = [outcome for outcome in self.outcomes if outcome.bounded]
        compositions = [outcome for outcome in bounded if len(outcome.case.parts) > 1]
        lines.append(_row("**all**", [o for o in bounded if len(o.case.parts) == 1], compositions))
        lines += ["", f"{len(self.outcomes)} cases, {len(self.outcomes) - len(bounded)} of them without a bound. "
                      f"Largest ratio {max((o.ratio for o in bounded), default=0.0):.6f}, "
                      f"violations {len(self.violations)}."]  # fmt: skip
        for outcome in self.violations:
            lines += ["", f"VIOLATION {outcome}", f"    python -m tests.attack --seed {outcome.case.seed} "
                                                  f"--case {outcome.case.number}"]  # fmt: skip
        return "\n".join(lines)


def _row(name, alone, inside):
    cells = [name, str(len(alone)), "", "", "", str(len(inside)), ""]
    if alone:
        worst = max(alone, key=lambda outcome: outcome.ratio)
        median = statistics.median(outcome.ratio for outcome in alone)
        where = f"{worst.case.norm}, {worst.dtype}, N = {worst.case.tokens}"
        cells[2:5] = [_number(worst.ratio), _number(median), where]
    if inside:
        cells[6] = _number(max(outcome.ratio for outcome in inside))
    return f"| {' | '.join(cells)} |"


def _number(ratio):
    """Six digits behind the point, never rounded up to 1."""
    return f"{min(ratio, 0.999999):.6f}" if ratio < 1 else f"{ratio:.6f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
