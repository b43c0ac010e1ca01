"""Try every verb on a small model of each family and write what came of it into docs/families.md.

    python tools/support_table.py

A test tries each family again and compares its row with the page.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "families.md"
BEGIN, END = "<!-- support table: tools/support_table.py -->\n", "<!-- end of the support table -->"


def main() -> None:
    """Write the table between its marks."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.insert(0, str(ROOT))
    from tests.support.support_table import FAMILIES, row, table

    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    found = table({family: row(family) for family in FAMILIES})
    PAGE.write_text(f"{before}{BEGIN}\n{found}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    sys.stdout.write(found)


if __name__ == "__main__":
    main()
