"""Draw docs/pictures/certified.svg from the committed rows of the study: certified and attacked accuracy over radius.

wellposed reproduce frontier/accuracy --scale mini --data DATA --out runs/frontier
cp runs/frontier/frontier-accuracy.{csv,json} benchmarks/reproduction/
python tools/certified_picture.py
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from wellposed.charts import draw, where
from wellposed.recipes.frontier.curves import curves_panel

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "benchmarks" / "reproduction" / "frontier-accuracy.csv"
PICTURE = ROOT / "docs" / "pictures" / "certified.svg"
TITLES = {"ag_news": "AG News", "imdb": "IMDb"}
LABELS = ("lipschitz, T = 10", "no blocks, T = 10", "rezero", "post_ln")


def main() -> int:
    """Draw the rows of both corpora."""
    with ROWS.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["radius"]]
    draw([curves_panel(title, where(rows, corpus=corpus), LABELS) for corpus, title in TITLES.items()], PICTURE)
    sys.stdout.write(f"{PICTURE}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
