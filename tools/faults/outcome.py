"""What a family of faults tried, and what went wrong."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field

KINDS = {
    "lost": "a result that was there, or could have been, is gone",
    "foreign": "an exception of another family, or a traceback",
    "wrong": "another result, or half a file taken for whole, without a word",
    "unclear": "an error that does not name the file",
    "hung": "no end within the time allowed",
    "crashed": "the process died, or took more memory than it was given",
    "orphan": "a process that outlived its command",
}
"""Every kind of fault, and what it is."""


def chosen(name: str, only: str) -> bool:
    """Return whether ``name`` holds one of the words of ``only``, between commas; an empty one is
    in every name."""
    return any(word in name for word in only.split(","))


@dataclass(frozen=True)
class Fault:
    """One thing that went wrong."""

    kind: str
    case: str
    detail: str

    def line(self) -> str:
        """Return the fault in one line."""
        return f"{self.kind}: {self.case}: {' '.join(self.detail.split())[:400]}"


@dataclass
class Row:
    """One line of the table: what was tried, how often, and the faults."""

    family: str
    what: str
    tried: int = 0
    unit: str = "tries"
    faults: list[Fault] = field(default_factory=list)

    def add(self, *faults: Fault) -> None:
        """Note faults and say so at once: what follows may take an hour."""
        self.faults.extend(faults)
        for fault in faults:
            sys.stderr.write(f"  {fault.line()}\n")
            sys.stderr.flush()

    def counts(self) -> Counter[str]:
        """Return the number of faults of each kind."""
        return Counter(fault.kind for fault in self.faults)
