"""Write the results of reproductions into the pages that quote them: `python -m tools.quoted_rows`.

A page quotes a row between `<!-- row NAME -->` and `<!-- end of row -->`. A number of a reproduction
stands in its JSON file alone, and a test compares the pages with it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "benchmarks" / "reproduction"
QUOTE = re.compile(r"<!-- row ([\w./-]+) -->\n.*?<!-- end of row -->", re.DOTALL)

BETWEEN = re.compile(r"; (?![^(]*\))")
"""Border of two results: a semicolon outside brackets."""


def with_rows(text: str) -> str:
    """Return a page with the results of the rows that it quotes."""

    def quoted(match: re.Match[str]) -> str:
        name = match[1]
        row = json.loads((ROWS / f"{name.replace('/', '-')}.json").read_text(encoding="utf-8"))
        results = BETWEEN.split(row["we_got"])
        lines = "\n".join(f"- {result}" for result in results)
        head = f"`{row['command']}`, {row['made_with']['date']}:"
        return f"<!-- row {name} -->\n{head}\n\n{lines}\n<!-- end of row -->"

    return QUOTE.sub(quoted, text)


def main() -> None:
    """Rewrite every page that quotes a row."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if with_rows(text) != text:
            page.write_text(with_rows(text), encoding="utf-8")


if __name__ == "__main__":
    main()
