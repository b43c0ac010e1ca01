"""24 and 1,000 layers without norms and without warm-up: the loss of T-Fixup, ReZero and `lipschitz`
after thirty steps at each of some rates, of character language models of width 64.

Prints a row of csv for each training; those at hand are `benchmarks/thousand_layers.csv`:
`python -m benchmarks.thousand_layers tinyshakespeare.txt.gz runs/thousand`.
"""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from wellposed.compare.runs import PlannedRun, train_planned
from wellposed.compare.variants import apply_variant
from wellposed.training import read_metrics
from wellposed.training.config import ModelOptions, RunConfig, TrainOptions

RATES = {
    ("t_fixup", 24): (1e-3, 3e-3, 1e-2),
    ("t_fixup", 1000): (3e-5, 1e-4, 3e-4),
    ("rezero", 24): (3e-3, 1e-2, 3e-2),
    ("rezero", 1000): (1e-3, 3e-3, 1e-2),
    ("lipschitz", 24): (3e-3, 1e-2, 3e-2),
    ("lipschitz", 1000): (3e-3, 1e-2, 3e-2),
}
SEEDS, STEPS, LAST = 3, 30, 5


def planned(path: str, out: Path, variant: str, depth: int, rate: float, seed: int) -> PlannedRun:
    """Return a training whose every step is logged."""
    model = ModelOptions(hidden_size=64, num_hidden_layers=depth, num_attention_heads=4)
    train = TrainOptions(
        steps=STEPS, batch_size=8, eval_every=STEPS, eval_batches=1, log_every=1,
        schedule="constant", warmup_steps=0, seed=seed,
    )  # fmt: skip
    config = apply_variant(
        variant, RunConfig("char_lm", {"data": path, "seq_len": 32}, model=model, train=train)
    )
    config = replace(config, train=replace(config.train, learning_rate=rate))
    label = f"{variant}-{depth}-{rate:g}-{seed}"
    return PlannedRun(out / label, label, config)


def after(run: PlannedRun) -> tuple[float, float]:
    """Train, and return the first loss and the mean of the last five; infinite where it failed."""
    for result in train_planned([run], announce=lambda _: None, test_batches=1):
        rows = [row["loss"] for row in read_metrics(run.folder) if row["split"] == "train"]
        last = fmean(rows[-LAST:]) if result.status == "success" else math.inf
        return rows[0] if rows else math.inf, last
    raise KeyboardInterrupt


def main(path: str, out: str) -> None:
    """Print every row: the first seed at every rate, the others at the best."""
    print("variant,depth,rate,seed,first,last")
    for (variant, depth), rates in RATES.items():
        found: dict[float, float] = {}
        for rate in rates:
            first, found[rate] = after(planned(path, Path(out), variant, depth, rate, 0))
            print(f"{variant},{depth},{rate:g},0,{first:.4g},{found[rate]:.4g}", flush=True)
        best = min(found, key=lambda rate: found[rate])
        for rate, seed in itertools.product([best], range(1, SEEDS)):
            first, last = after(planned(path, Path(out), variant, depth, rate, seed))
            print(f"{variant},{depth},{rate:g},{seed},{first:.4g},{last:.4g}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
