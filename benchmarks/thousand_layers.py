"""Loss of T-Fixup, ReZero and `lipschitz` at 24 and 1,000 layers, without norms or warm-up.

Character language models of width 64: mean loss of the last five of thirty steps at several rates.
Prints one csv row per training; results are in `benchmarks/thousand_layers.csv`:
`python -m benchmarks.thousand_layers tinyshakespeare.txt.gz runs/thousand`.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from wellposed.model_options import ModelOptions
from wellposed_lab.compare.variants import apply_variant
from wellposed_lab.training.config import RunConfig, TrainOptions
from wellposed_studies.recipe import Request
from wellposed_studies.study import FinishedRun, train_grid
from wellposed_studies.tuning import at_rates, tune

RATES = {
    ("t_fixup", 24): (1e-3, 3e-3, 1e-2),
    ("t_fixup", 1000): (3e-5, 1e-4, 3e-4),
    ("rezero", 24): (3e-3, 1e-2, 3e-2),
    ("rezero", 1000): (1e-3, 3e-3, 1e-2),
    ("lipschitz", 24): (3e-3, 1e-2, 3e-2),
    ("lipschitz", 1000): (3e-3, 1e-2, 3e-2),
}
SEEDS, STEPS, LAST = 3, 30, 5


def config(path: str, variant: str, depth: int, rate: float, seed: int) -> RunConfig:
    model = ModelOptions(hidden_size=64, num_hidden_layers=depth, num_attention_heads=4)
    train = TrainOptions(
        steps=STEPS, batch_size=8, eval_every=STEPS, eval_batches=1, log_every=1,
        schedule="constant", warmup_steps=0, seed=seed,
    )  # fmt: skip
    base = RunConfig("char_lm", {"data": path, "seq_len": 32}, model=model, train=train)
    changed = apply_variant(variant, base)
    return replace(changed, train=replace(changed.train, learning_rate=rate))


def ended(run: FinishedRun) -> float:
    """Return the mean loss of the last steps; infinite if training failed."""
    return math.inf if run.failure else fmean(loss for _, loss in run.curve("train")[-LAST:])


def main(path: str, out: str) -> None:
    """Print all rows: the first seed at each rate, the others at the best."""
    train = partial(train_grid, Request("mini", Path(out)), test_batches=1)
    print("variant,depth,rate,seed,first,last")
    for (variant, depth), rates in RATES.items():
        label = f"{variant}-{depth}"
        plan = at_rates(Path(out) / label, label, partial(config, path, variant, depth))
        tuned = tune(train, plan, rates, SEEDS, score=lambda run: -ended(run))
        for run in [*tuned.trials, *tuned.runs[1:]]:
            first = run.curve("train")[0][1]
            row = (label.replace("-", ","), f"{run.rate:g}", run.seed, f"{first:.4g}")
            print(*row, f"{ended(run):.4g}", sep=",", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
