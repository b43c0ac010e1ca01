"""``wellposed report RUN...``: one HTML page that can be mailed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from wellposed.errors import ConfigError
from wellposed_lab.cli.parser import Positional, parse_words


@dataclass(frozen=True)
class ReportArguments:
    """Write one HTML page about runs and reproductions; nothing beside it is needed to read it."""

    runs: Annotated[tuple[Path, ...], Positional] = ()
    """Folders of runs or reproductions, or folders that hold run folders; the first variant
    is the one others are compared with."""
    out: Path = Path("report.html")
    """Page to write; the data of its tables and figures is inside, as CSV."""


def run(words: Sequence[str]) -> int:
    """Write the report, print the comparison and the page's path."""
    options = parse_words(ReportArguments, words, prog="wellposed report")

    if not options.runs:
        raise ConfigError(
            "report: name the folders of runs, for instance `wellposed report runs/*`"
        )
    from wellposed_lab.report.aggregate import aggregate
    from wellposed_lab.report.page import build_report

    # First, since it reads more files: damage must not follow a table.
    page = build_report(options.runs, options.out)
    if table := aggregate(options.runs).table():
        print(table)
    print(f"report: {page}")
    return 0
