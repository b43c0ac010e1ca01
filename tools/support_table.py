"""Write what each verb does with each family into docs/families.md, from what tests/roles tries.

python tools/support_table.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "families.md"
BEGIN = "<!-- table of verbs: tools/support_table.py -->\n"
END = "<!-- end of the table of verbs -->"


def main() -> None:
    """Write the table between its marks."""
    sys.path.insert(0, str(ROOT))
    from tests.support.many_families import verbs_table

    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{verbs_table()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
