"""Depth without normalisation: which models train, and the certificates of deep ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from wellposed_lab.charts import Panel, Row, lines, where
from wellposed_lab.compare.runs import PlannedRun
from wellposed_studies.frontier.certified import Model, find_texts, text_run
from wellposed_studies.recipe import Reproduction, Request, recipe
from wellposed_studies.study import (
    FinishedRun,
    Sizes,
    depths_trained,
    folder_name,
    judged,
    listing,
    log_panel,
    sizes_at,
    train_grid,
)
from wellposed_studies.verdicts import AGREED, Power

MODELS = {
    "plain, no norm": Model("post_ln", norm="none"),
    "rezero": Model("rezero"),
    "lipschitz": Model("lipschitz"),
}
CONTROL = "lipschitz, no blocks"
SLACK = 0.02
"""A depth trains only if it is not worse than no blocks by more, in accuracy on valid."""


def sizes_of(request: Request) -> Sizes:
    return sizes_at(request, "frontier/depth")


@recipe("frontier/depth", takes=("data",), power=Power(sizes_of))
def depth(request: Request) -> Reproduction:
    """Accuracy and certified total by depth without normalisation: lipschitz, ReZero and plain
    residuals.

    Claim: a claim of ours: the variant lipschitz trains at every depth from 2 to 64 without a norm,
        with a certified total of at most 1.
    Test: `lipschitz` trains at every depth, with a total of at most 1. A depth trains if in every
        seed the accuracy on valid is above that of the most frequent label, and at most {SLACK:g}
        below that of `lipschitz` without blocks. Then it need not level off, but the model without
        blocks must.
    """
    sizes = sizes_of(request)
    corpus, data = next(iter(find_texts(request).items()))
    grid: list[tuple[int, int, str]] = [
        *((0, seed, CONTROL) for seed in range(sizes.seeds)),
        *itertools.product(sizes.depths, range(sizes.seeds), MODELS),
    ]
    models, planned = {**MODELS, CONTROL: Model("lipschitz", blocks=False)}, []
    for layers, seed, label in grid:
        folder = request.runs("frontier-depth") / f"{folder_name(label)}-{layers}-seed{seed}"
        config = models[label].config(text_run(corpus, data, replace(sizes, layers=layers), seed))
        planned.append(PlannedRun(folder, f"{label}, {layers} blocks, seed {seed}", config))
    runs = train_grid(request, planned)
    control = {run.seed: run.metric("accuracy,valid", 0.0) for run in runs[: sizes.seeds]}

    def trains(run: FinishedRun) -> bool:
        accuracy, constant = run.metric("accuracy,valid", 0.0), run.reference.get("accuracy", 1.0)
        return accuracy > constant and accuracy >= control[run.seed] - SLACK

    labels = [label for *_, label in grid]
    rows = [
        {**_row(corpus, label, run), "trains": trains(run)}
        for label, run in zip(labels, runs, strict=True)
    ]
    without = listing(f"{accuracy:.3f}" for accuracy in control.values())
    trained, largest, texts = {}, {}, [f"accuracy on valid without blocks {without}"]
    for label in MODELS:
        mine = [run for run, of in zip(runs, labels, strict=True) if of == label]
        trained[label] = depths_trained(mine, trains)
        largest[label] = max(row["total"] for row in where(rows, model=label))
        texts.append(
            f"{label} trains at {listing(trained[label])} blocks, largest certified total"
            f" {largest[label]:.3g}"
        )
    got = (
        f"{'; '.join(texts)}; {corpus}, width {sizes.width}, {sizes.steps} steps, {sizes.seeds}"
        " seeds"
    )
    holds = judge_depth(trained["lipschitz"], sizes.depths, largest["lipschitz"])
    runs = [run for run, of in zip(runs, labels, strict=True) if of in ("lipschitz", CONTROL)]

    def passed(run: FinishedRun) -> bool:
        return bool(run.depth) and trains(run)

    return judged(request, rows, _panels(rows), got, holds, runs, uncertainty=AGREED, passed=passed)


def judge_depth(trained: Sequence[int], depths: Sequence[int], largest_total: float) -> bool:
    return list(trained) == list(depths) and largest_total <= 1


def _row(corpus: str, label: str, run: FinishedRun) -> Row:
    """Return a row with the certified constant, on a ball if necessary; infinite if there is none."""
    from wellposed_lab.training.certified.run import best_certificate

    total, longest = math.inf, int(run.config.task_options["max_length"] or 0)
    if not run.failure:
        total = best_certificate(run.model, longest).total
    row = {"corpus": corpus, "model": label, "blocks": run.depth, "seed": run.seed}
    return {**row, "accuracy": run.metric("accuracy,test"), "total": total, "error": run.failure}


def _panels(rows: Sequence[Row]) -> list[Panel]:
    dots = lines(rows, "blocks", "accuracy", by="model", style="dots")
    bounded = [row for row in rows if math.isfinite(row["total"])]
    return [
        Panel("accuracy by depth, no norms", "blocks", "accuracy on test", dots, x_scale="log"),
        log_panel("certified Lipschitz constant by depth", bounded, "blocks", "total", by="model"),
    ]
