"""``wellposed report RUN...``: one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from wellposed.errors import ConfigError, require_extras
from wellposed_lab.cli.parser import Positional, parse_words


@dataclass(frozen=True)
class ReportArguments:
    """Write one HTML page about runs and reproductions that needs no other file."""

    runs: Annotated[tuple[Path, ...], Positional] = ()
    """Folders of runs or reproductions, or folders of these; the first variant is the baseline."""
    out: Path = Path("report.html")
    """Page to write; it contains the data of its tables and figures as CSV."""


def run(words: Sequence[str]) -> int:
    """Write the report, print the comparison and the page's path."""
    options = parse_words(ReportArguments, words, prog="wellposed report")

    if not options.runs:
        raise ConfigError(
            "report: name the folders of runs, for instance `wellposed report runs/*`"
        )
    require_extras(("compare", "plots"), "reports")
    from wellposed_lab.report.aggregate import aggregate
    from wellposed_lab.report.page import build_report

    # The page first: it reads more files, so damage is found before the table is printed.
    page = build_report(options.runs, options.out)
    table = aggregate(options.runs).table()
    if table:
        print(table)
    print(f"report: {page}")
    return 0
