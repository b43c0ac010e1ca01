"""Huang et al. (2020): how deep an encoder-decoder trains without LayerNorm and warm-up.

All models get the same batches and inverse square root schedule. The first seed tries the same
three rates at every depth; the other seeds use the one with the least loss on valid. A run trains
if its loss on valid ends below the unigram model's, the best predictor that ignores its input.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from wellposed_lab.charts import Panel, Row, lines
from wellposed_lab.compare.variants import apply_variant
from wellposed_lab.training.config import RunConfig
from wellposed_studies.recipe import Reproduction, Request, recipe
from wellposed_studies.sentences import READS, translation_data
from wellposed_studies.study import (
    FinishedRun,
    Sizes,
    curves,
    depths_trained,
    judged,
    listing,
    run_config,
    sizes_at,
    train_grid,
)
from wellposed_studies.tuning import at_rates, tune
from wellposed_studies.verdicts import AGREED, Power

LABELS = {"t_fixup": "T-Fixup", "post_ln": "post-LN"}


def sizes_of(request: Request) -> Sizes:
    return sizes_at(request, "huang2020/depth")


@recipe("huang2020/depth", power=Power(sizes_of), **READS)
def depth(request: Request) -> Reproduction:
    """Loss by depth without warm-up: T-Fixup and post-LN.

    Claim: without LayerNorm and without warm-up, encoder-decoders of 200+200 layers train.
    Test: at the greatest depth tried every seed of T-Fixup ends with a loss on valid below the
        unigram model's. No seed of post-LN does. A run that is below it need not level off.
    """
    sizes = sizes_of(request)
    return summarise(request, sizes, train_depths(request, sizes))


def train_depths(request: Request, sizes: Sizes) -> list[FinishedRun]:
    """Train every depth on the same batches: the first seed at every rate, all at the best."""
    from wellposed_lab.tasks.task import build_task

    generated = request.data is None
    options = {
        **translation_data(request, pairs=sizes.pairs),
        "tokenizer": "char" if generated else "bpe",
        "vocab_size": 2000,
        "max_tokens": 16 if generated else 128,
        "generate_beams": 1,
        "generate_max_examples": 4,
    }
    task = build_task("translation", options)

    def config(variant: str, layers: int, rate: float, seed: int) -> RunConfig:
        base = run_config(
            "translation",
            options,
            replace(sizes, layers=layers, learning_rate=rate),
            seed=seed,
            model={"activation": "relu"},
            schedule="inverse_sqrt",
            weight_decay=1e-4,
        )
        return apply_variant(variant, base)

    runs: list[FinishedRun] = []
    for layers, variant in itertools.product(sizes.depths, LABELS):
        folder = request.runs("huang2020-depth") / f"{variant}-{layers}"
        label = f"{LABELS[variant]}, {layers}+{layers} layers"
        runs += tune(
            lambda planned: train_grid(request, planned, task=task),
            at_rates(folder, label, partial(config, variant, layers)),
            sizes.rates,
            sizes.seeds,
            score=lambda run: -_loss(run),
        ).runs
    return runs


def summarise(request: Request, sizes: Sizes, runs: Sequence[FinishedRun]) -> Reproduction:
    unigram = runs[0].reference["loss"]

    def trains(run: FinishedRun) -> bool:
        return _loss(run) < unigram

    rows: list[Row] = []
    for run in runs:
        row = {"variant": LABELS[run.variant], "layers_each_side": run.depth, "seed": run.seed}
        row |= {"learning_rate": run.rate, "valid_loss": _loss(run), "unigram_loss": unigram}
        rows.append({**row, "trains": trains(run), "error": run.failure})
    deepest = max(run.depth for run in runs)
    cut = [{**row, "valid_loss": min(row["valid_loss"], 2 * unigram)} for row in rows]
    dots = lines(cut, "layers_each_side", "valid_loss", by="variant", style="dots")
    level = ("unigram model", unigram)
    y = "nats per token on valid"
    by_depth = Panel("no warm-up", "layers each side", y, dots, x_scale="log", level=level)
    texts = []
    panels = [by_depth]
    at_deepest = []
    for variant, label in LABELS.items():
        mine = [run for run in runs if run.variant == variant]
        last = [run for run in mine if run.depth == deepest]
        losses = ", ".join(f"{_loss(run):.3f}" if run.metrics else "not finite" for run in last)
        depths = listing(depths_trained(mine, trains))
        texts.append(f"{label} trains at {depths} layers a side, loss at {deepest} {losses}")
        first_seed = (run for run in mine if run.seed == 0)
        series = curves(first_seed, "train", lambda run: f"{run.depth} layers")
        panels.append(Panel(label, "step", "training loss", series))
        at_deepest.append([trains(run) for run in last])
    rates = ", ".join(f"{rate:g}" for rate in sizes.rates)
    got = (
        f"{'; '.join(texts)}; unigram model {unigram:.3f}; width {sizes.width}, {sizes.steps}"
        f" steps, {sizes.seeds} seeds"
    )
    note = (
        "no warm-up on either side; at every depth each side at its best of the rates"
        f" {rates} by the loss on valid of the first seed"
    )
    holds = judge_depth(*at_deepest)
    last = [run for run in runs if run.depth == deepest]
    extra = {"uncertainty": AGREED, "fails": lambda run: run.variant == "post_ln", "notes": [note]}
    return judged(request, rows, panels, got, holds, last, passed=trains, **extra)


def judge_depth(t_fixup: Sequence[bool], post_ln: Sequence[bool]) -> bool:
    return all(t_fixup) and not any(post_ln)


def _loss(run: FinishedRun) -> float:
    """Return nats per token on valid; infinite if training diverged."""
    return run.metric("loss,valid", math.inf)
