"""Depth without normalisation: which models train, and the certificates of deep ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from wellposed_lab.charts import Panel, Row, lines, where
from wellposed_lab.compare.runs import PlannedRun
from wellposed_studies.frontier.certified import Model
from wellposed_studies.frontier.order import TASKS
from wellposed_studies.recipe import Reproduction, Request, recipe
from wellposed_studies.study import (
    FinishedRun,
    Sizes,
    depths_trained,
    folder_name,
    judged,
    listing,
    log_panel,
    run_config,
    sizes_at,
    train_grid,
)
from wellposed_studies.verdicts import AGREED, Power

TASK, OPTIONS = TASKS["order"]
LENGTH = 9
"""The question and the eight words after it."""
MODELS = {
    "plain, no norm": Model("post_ln", norm="none"),
    "rezero": Model("rezero"),
    "lipschitz": Model("lipschitz", 30.0, usual_rate=3e-3),
}
BAG = 0.5
MARGIN = 0.1
"""Exact accuracy of the best guess from a bag of words, and what a depth must add to it on valid."""


def sizes_of(request: Request) -> Sizes:
    return sizes_at(request, "frontier/depth")


@recipe("frontier/depth", power=Power(sizes_of))
def depth(request: Request) -> Reproduction:
    """Accuracy and certified total by depth without normalisation: lipschitz, ReZero and plain
    residuals.

    Claim: a claim of ours: the variant lipschitz trains at every depth from 2 to 64 without a norm,
        with a certified total of at most 1.
    Test: the task is the first of two words among fillers, as in frontier/order: a model without
        blocks is right half of the time at best. `lipschitz` trains at every depth, with a total of
        at most 1. A depth trains if in every seed the accuracy on valid is {MARGIN:g} or more above
        that half. Then it need not level off.
    Note: until 2026-11-28 on AG News, which does not need the blocks. One learning rate each.
    """
    sizes = sizes_of(request)
    grid = list(itertools.product(sizes.depths, range(sizes.seeds), MODELS.items()))
    planned = []
    for layers, seed, (label, model) in grid:
        folder = request.runs("frontier-depth") / f"{folder_name(label)}-{layers}-seed{seed}"
        at_depth = replace(sizes, layers=layers, learning_rate=model.usual_rate)
        base = run_config(TASK, OPTIONS, at_depth, seed=seed, model={"pooling": "first"})
        name = f"{label}, {layers} blocks, seed {seed}"
        planned.append(PlannedRun(folder, name, model.config(base)))

    runs = train_grid(request, planned)
    labels = [label for *_, (label, _) in grid]
    rows = [_row(label, run) for label, run in zip(labels, runs, strict=True)]
    trained = {}
    largest = {}
    texts = []
    for label in MODELS:
        mine = [run for run, name in zip(runs, labels, strict=True) if name == label]
        trained[label] = depths_trained(mine, trains)
        largest[label] = max(row["total"] for row in where(rows, model=label))
        texts.append(
            f"{label} trains at {listing(trained[label])} blocks, largest certified total"
            f" {largest[label]:.3g}"
        )

    got = f"{'; '.join(texts)}; width {sizes.width}, {sizes.steps} steps, {sizes.seeds} seeds"
    holds = judge_depth(trained["lipschitz"], sizes.depths, largest["lipschitz"])
    runs = [run for run, name in zip(runs, labels, strict=True) if name == "lipschitz"]
    return judged(request, rows, _panels(rows), got, holds, runs, uncertainty=AGREED, passed=trains)


def trains(run: FinishedRun) -> bool:
    return run.metric("accuracy,valid", 0.0) >= BAG + MARGIN


def judge_depth(trained: Sequence[int], depths: Sequence[int], largest_total: float) -> bool:
    return list(trained) == list(depths) and largest_total <= 1


def _row(label: str, run: FinishedRun) -> Row:
    """Return a row with the certified constant, on a ball if necessary; infinite if there is none."""
    from wellposed_lab.training.certified.run import best_certificate

    total = math.inf
    if not run.failure:
        total = best_certificate(run.model, LENGTH).total
    row = {"model": label, "blocks": run.depth, "seed": run.seed, "trains": trains(run)}
    return {**row, "accuracy": run.metric("accuracy,test"), "total": total, "error": run.failure}


def _panels(rows: Sequence[Row]) -> list[Panel]:
    dots = lines(rows, "blocks", "accuracy", by="model", style="dots")
    bounded = [row for row in rows if math.isfinite(row["total"])]
    return [
        Panel("accuracy by depth, no norms", "blocks", "accuracy on test", dots, x_scale="log"),
        log_panel("certified Lipschitz constant by depth", bounded, "blocks", "total", by="model"),
    ]
