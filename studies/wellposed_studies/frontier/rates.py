"""Loss against learning rate: does a cap on the matrices of the layers widen the usable range?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from wellposed_lab.charts import Panel, Row, medians, where
from wellposed_lab.compare.runs import PlannedRun
from wellposed_lab.compare.variants import apply_variant
from wellposed_lab.statistics import PairedComparison, holm_correction, paired_comparison
from wellposed_lab.training.config import RunConfig
from wellposed_studies.recipe import Reproduction, Request, Verdict, recipe
from wellposed_studies.study import (
    FinishedRun,
    Sizes,
    folder_name,
    judged,
    mean_se,
    run_config,
    sizes_at,
    train_grid,
)
from wellposed_studies.verdicts import Power, every, gain

NEAR = 0.05
"""A rate counts as good within this many nats of the model's best loss."""
LEAST = 0.02
"""Smallest change of the best loss, in nats, that counts."""
LEAST_SENSITIVITY = 0.05
"""Smallest change of the sensitivity, in nats, that counts."""
CAPS = ("1", "2", "4")
"""Radii of the cap, in units of the root mean square: |W|_2 <= radius sqrt(fan_out / fan_in)."""
HELD = "query,key,value,output,feedforward_in,feedforward_out"
PLAIN: Mapping[str, str] = {
    "post-LN": "post_ln",
    "post-LN, warm-up": "post_ln_warmup",
    "pre-LN": "pre_ln",
    "qk-norm": "qk_norm",
    "QK-clip": "qk_clip",
    "ReZero": "rezero",
    "DyT": "dyt",
    "T-Fixup": "t_fixup",
    "L2": "l2",
    "cosine": "cosine",
    "lipschitz": "lipschitz",
}
"""Models without a cap, by their variant."""
RIVALS = {"post-LN capped at 1": "post-LN", "pre-LN capped at 1": "pre-LN"}
"""Judged models, and the model that each is compared with."""


def models() -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Return the variant of each model and the constraint on its weights."""
    variants: dict[str, tuple[str, Mapping[str, Any]]] = {
        name: (v, {}) for name, v in PLAIN.items()
    }
    for norm, variant in (("post-LN", "post_ln"), ("pre-LN", "pre_ln")):
        for radius in CAPS:
            cap = {"where": HELD, "to": "spectral", "bound": f"rms:{radius}"}
            variants[f"{norm} capped at {radius}"] = variant, cap
        variants[f"{norm} orthogonal"] = variant, {"where": HELD, "to": "orthogonal"}
    return variants


def model_config(label: str, base: RunConfig, rate: float) -> RunConfig:
    """Return a model at this rate, which replaces the rate of the variant."""
    variant, constrain = models()[label]
    config = apply_variant(variant, base)
    config = replace(config, constrain=replace(config.constrain, **constrain))
    return replace(config, train=replace(config.train, learning_rate=rate))


def sizes_of(request: Request) -> Sizes:
    return sizes_at(request, "frontier/rates")


@recipe(
    "frontier/rates",
    folders=("text/tinyshakespeare.txt.gz",),
    takes=("data",),
    builtin="English prose that ships with Python",
    power=Power(sizes_of, "sensitivity, in nats", 0.03, "a first look at 300 steps", tests=2),
)
def rates(request: Request) -> Reproduction:
    """Loss against learning rate of models with and without a cap on the matrices of their layers.

    Claim: a claim of ours: with every matrix of the layers capped at the root mean square 1, a
        Transformer trains at more learning rates, and at its best rate no worse.
    Test: against the same model without a cap, after post-LN and after pre-LN: the sensitivity is
        significantly lower, and by {LEAST_SENSITIVITY:g} or more. It is the mean over the rates of
        the test loss above the model's best, losses capped at that of the best constant. The loss
        at the best rate on valid is not worse by {LEAST:g} nats or more. Paired t-tests over seeds,
        Holm-corrected, at 5 %.
    Note: sensitivity after Wortsman et al. (2023), who cap losses at the initial one. Rates in half
        decades; every model at its own best rate by the mean loss on valid; no warm-up unless
        named.
    Note: a run that diverges counts with the loss of the best constant.
    """
    sizes = sizes_of(request)
    options = {"seq_len": sizes.seq_len, "data": request.data, "limit_chars": sizes.limit}
    grid: list[tuple[str, float, int]] = [
        *itertools.product(models(), sizes.rates, range(sizes.seeds))
    ]
    folder = request.runs("frontier-rates")
    planned = [
        PlannedRun(
            folder / folder_name(label) / f"{rate:g}" / f"seed-{seed}",
            f"{label} at {rate:g}, seed {seed}",
            model_config(
                label, run_config("char_lm", options, sizes, seed=seed, **sizes.options), rate
            ),
        )
        for label, rate, seed in grid
    ]
    runs = train_grid(request, planned)
    constant = next(run.reference for run in runs)["nats_per_char"]
    rows = [
        _row(label, rate, seed, run, constant)
        for (label, rate, seed), run in zip(grid, runs, strict=True)
    ]
    summaries = {label: summary(where(rows, model=label)) for label in models()}
    tests = [paired(summaries[capped], summaries[plain]) for capped, plain in RIVALS.items()]
    best = [
        run
        for (label, rate, _), run in zip(grid, runs, strict=True)
        if label in RIVALS and rate == summaries[label]["rate"]
    ]
    texts = [
        f"{label}: best {mean_se(summary['best'])} at {summary['rate']:g},"
        f" sensitivity {mean_se(summary['sensitivity'])},"
        f" {summary['near']:.0%} of the rates within {NEAR:g}"
        for label, summary in summaries.items()
    ]
    got = f"{sizes.layers} layers of width {sizes.width}, {sizes.steps} steps: {'; '.join(texts)}"
    settings = {"uncertainty": "paired t-tests over seeds, Holm-corrected, at 5 %", "level": False}

    return judged(request, rows, _panels(rows), got, judge_rates(tests), best, **settings)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return best rate on valid, test losses there, sensitivity by seed, and share of good rates."""
    rates_tried = dict.fromkeys(row["rate"] for row in rows)
    valid, test = (
        {rate: [row[split] for row in where(rows, rate=rate)] for rate in rates_tried}
        for split in ("valid", "test")
    )
    rate = min(valid, key=lambda rate: fmean(valid[rate]))
    smallest = fmean(test[rate])
    by_seed = zip(*test.values(), strict=True)
    above = [fmean(losses) - best for losses, best in zip(by_seed, test[rate], strict=True)]
    near = fmean(fmean(losses) <= smallest + NEAR for losses in test.values())
    return {"rate": rate, "best": test[rate], "sensitivity": above, "near": near}


Tests = tuple[PairedComparison, PairedComparison]


def paired(capped: Mapping[str, Any], plain: Mapping[str, Any]) -> Tests:
    """Return the paired tests of sensitivity and best loss over seeds; lower is better."""
    names = ("sensitivity", "best")
    first, second = (
        paired_comparison(capped[name], plain[name], higher_is_better=False) for name in names
    )
    return first, second


def judge_rates(tests: Sequence[Tests]) -> Verdict:
    ranges, losses = zip(*tests, strict=True)
    wider = [gain(test, LEAST_SENSITIVITY, parts=len(ranges)) for test in holm_correction(ranges)]
    harmless = [not_worse(test) for test in losses]
    return every([*wider, *harmless])


def not_worse(test: PairedComparison) -> Verdict:
    """Return whether a loss of `LEAST` nats would have been seen and was not; False if it was."""
    verdict = gain(test, LEAST, rises=False)
    if verdict == "smaller" or verdict is False:
        return True
    return False if verdict else None


def _row(label: str, rate: float, seed: int, run: FinishedRun, constant: float) -> Row:
    losses = {
        split: min(constant, run.metric(f"nats_per_char,{split}", constant))
        for split in ("valid", "test")
    }
    losses = {split: constant if math.isnan(loss) else loss for split, loss in losses.items()}
    return {"model": label, "rate": rate, "seed": seed, **losses, "failed": run.failure}


def _panels(rows: Sequence[Row]) -> list[Panel]:
    kinds = {
        "without a cap": [*PLAIN],
        "post-LN": ["post-LN", *(name for name in models() if name.startswith("post-LN "))],
        "pre-LN": ["pre-LN", *(name for name in models() if name.startswith("pre-LN "))],
    }
    return [
        Panel(
            title,
            "learning rate",
            "test loss (nats)",
            medians([row for row in rows if row["model"] in labels], "rate", "test", by="model"),
            "log",
        )
        for title, labels in kinds.items()
    ]
