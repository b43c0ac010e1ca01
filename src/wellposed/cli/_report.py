"""``wellposed report RUN...``: one offline HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from wellposed.cli.parser import parse_words


@dataclass(frozen=True)
class ReportArguments:
    """Write one offline HTML page about finished runs."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run folders, or folders that hold run folders; the first variant is the one others are compared with."""
    out: Path = Path("report.html")
    """Page to write; the data of its figures goes to a folder beside it, as CSV."""


def run(words: Sequence[str]) -> int:
    """Write the report, print the comparison and the page's path."""
    options = parse_words(ReportArguments, words, prog="wellposed report")

    from wellposed.report import aggregate, build_report

    page = build_report(options.runs, options.out)  # first, since it reads more files: damage must not follow a table
    print(aggregate(options.runs).table())
    print(f"report: {page}")
    return 0
