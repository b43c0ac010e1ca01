"""Draw docs/pictures/depth.svg from a finished comparison: loss on valid over steps, mean over
seeds.

    wellposed compare char_lm --variants post_ln,pre_ln,rezero,t_fixup --seeds 3 --steps 120
    --batch-size 16 \\
        --seq-len 64 --limit-chars 200000 --learning-rate 2e-3 --eval-every 20 --eval-batches 10
        --log-every 5 \\ --model.num-hidden-layers 24 --model.hidden-size 64 --out runs/depth
    python tools/depth_picture.py runs/depth
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from wellposed.charts import Panel, Series, draw
from wellposed.training import read_metrics
from wellposed_studies.study import mean_and_error

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "depth.svg"


def curve(variant: Path) -> Series:
    """Return the mean of all seeds of a variant, with its standard error."""
    seeds = [
        {row["step"]: row["loss"] for row in read_metrics(run) if row["split"] == "valid"}
        for run in sorted(variant.glob("seed-*"))
    ]
    steps = sorted(set.intersection(*map(set, seeds)))
    means = [mean_and_error([seed[step] for seed in seeds]) for step in steps]
    return Series(
        f"{variant.name} ({len(seeds)} seeds)",
        steps,
        [mean for mean, _ in means],
        errors=[error for _, error in means],
    )


def main(words: list[str]) -> int:
    """Draw the comparison in the folder that is named."""
    folder = Path(words[0])
    order = json.loads((folder / "compare.json").read_text("utf-8"))["variants"]
    panel = Panel(
        "24 layers, 120 steps, one learning rate", "optimizer steps", "nats per character on valid",
        [curve(folder / name) for name in order],
    )  # fmt: skip
    PICTURE.parent.mkdir(exist_ok=True)
    draw([panel], PICTURE)
    sys.stdout.write(f"{PICTURE}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
