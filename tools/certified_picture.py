"""Draw docs/pictures/certified.svg from the committed rows of two studies: certified and attacked
accuracy over radius.

wellposed reproduce frontier/accuracy frontier/order --scale mini --data DATA --out runs/frontier
cp runs/frontier/frontier-{accuracy,order}.{csv,json} benchmarks/reproduction/
python tools/certified_picture.py
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping
from pathlib import Path

from wellposed.charts import Panel, draw, where
from wellposed_studies.frontier.curves import curves_panel

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "benchmarks" / "reproduction"
PICTURE = ROOT / "docs" / "pictures" / "certified.svg"
PANELS = (
    ("order of two words", "frontier-order.csv", {"task": "order"}, "T = 100", "T = 30"),
    ("AG News", "frontier-accuracy.csv", {"corpus": "ag_news"}, "T = 10", "T = 10"),
)
"""Title, file and rows, and the temperature of the model and of its control without blocks."""


def panel(title: str, file: str, wanted: Mapping[str, str], model: str, control: str) -> Panel:
    """Return the curves of a certified model, its control and a plain Transformer, under the same
    three names."""
    names = {
        f"lipschitz, {model}": "lipschitz",
        f"no blocks, {control}": "the same without blocks",
        "rezero": "ReZero",
    }
    with (ROWS / file).open(newline="", encoding="utf-8") as opened:
        rows = [
            row
            for row in where(list(csv.DictReader(opened)), **wanted)
            if row["radius"] and row["model"] in names
        ]
    renamed = [{**row, "model": names[row["model"]]} for row in rows]
    return curves_panel(title, renamed, names.values())


def main() -> int:
    """Draw both panels."""
    draw([panel(*described) for described in PANELS], PICTURE)
    sys.stdout.write(f"{PICTURE}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
