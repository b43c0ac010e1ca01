"""What the attacks found, rule by rule, as a Markdown table."""

import statistics
from collections import defaultdict
from dataclasses import dataclass, field

from .measure import Outcome


@dataclass
class Table:
    """Outcomes so far."""

    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def violations(self):
        """Cases whose slope is above their certificate by more than rounding."""
        return [outcome for outcome in self.outcomes if outcome.violates]

    def progress(self):
        """Return one line."""
        worst = max((outcome.ratio for outcome in self.outcomes), default=0.0)
        counts = f"{len(self.outcomes)} cases, {len(self.violations)} violations"
        return f"{counts}, largest ratio {worst:.6f}"

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
