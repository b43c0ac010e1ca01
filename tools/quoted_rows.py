"""Write the results of reproductions into the pages that quote them: `python -m tools.quoted_rows`.

A page quotes a row between `<!-- row NAME -->` and `<!-- end of row -->`, and the tables of a study
between `<!-- tables of NAME -->` and `<!-- end of tables -->`. A number of a reproduction
stands in its JSON file alone, and a test compares the pages with it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tools import method_table

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "benchmarks" / "reproduction"
QUOTE = re.compile(r"<!-- row ([\w./-]+) -->\n.*?<!-- end of row -->", re.DOTALL)
TABLES = re.compile(r"<!-- tables of ([\w./-]+) -->\n.*?<!-- end of tables -->", re.DOTALL)
TABLES_OF = {"frontier/methods": method_table.lines}
"""Function that yields the lines of the tables of a study."""

BETWEEN = re.compile(r"; (?![^(]*\))")
"""Border of two results: a semicolon outside brackets."""


def with_rows(text: str) -> str:
    """Return a page with the results of the rows that it quotes, and the tables."""

    def quoted(match: re.Match[str]) -> str:
        name = match[1]
        row = json.loads((ROWS / f"{name.replace('/', '-')}.json").read_text(encoding="utf-8"))
        results = BETWEEN.split(row["we_got"])
        lines = "\n".join(f"- {result}" for result in results)
        head = f"`{row['command']}`, {row['made_with']['date']}:"
        return f"<!-- row {name} -->\n{head}\n\n{lines}\n<!-- end of row -->"

    def tables(match: re.Match[str]) -> str:
        lines = "\n".join(TABLES_OF[match[1]]())
        return f"<!-- tables of {match[1]} -->\n\n{lines}\n<!-- end of tables -->"

    return TABLES.sub(tables, QUOTE.sub(quoted, text))


def main() -> None:
    """Rewrite every page that quotes a row."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if with_rows(text) != text:
            page.write_text(with_rows(text), encoding="utf-8")


if __name__ == "__main__":
    main()
