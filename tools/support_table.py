"""Try every verb on a small model of each family and write what came of it into docs/families.md.

    python tools/support_table.py            tries all, minutes
    python tools/support_table.py --verbs    writes the second table alone, which holds what tests/roles tries

A test tries each family again and compares its row with the page.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "families.md"
BEGIN, END = "<!-- support table: tools/support_table.py -->\n", "<!-- end of the support table -->"
VERBS = "<!-- table of verbs: tools/support_table.py -->\n", "<!-- end of the table of verbs -->"


def main() -> None:
    """Write the tables between their marks."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.insert(0, str(ROOT))
    from tests.support.many_families import verbs_table
    from tests.support.support_table import FAMILIES, row, table

    _write(verbs_table(), *VERBS)
    if "--verbs" not in sys.argv:
        _write(table({family: row(family) for family in FAMILIES}), BEGIN, END)


def _write(found: str, begin: str, end: str) -> None:
    before, _, rest = PAGE.read_text("utf-8").partition(begin)
    PAGE.write_text(f"{before}{begin}\n{found}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")
    sys.stdout.write(found)


if __name__ == "__main__":
    main()
