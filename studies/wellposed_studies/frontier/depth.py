"""Depth without normalisation: which models train, and what the certificate of a deep one is
worth."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from wellposed.charts import Panel, Row, lines
from wellposed.recipes.recipe import Criterion, Reproduction, Request
from wellposed_studies.frontier.accuracy import Model
from wellposed_studies.frontier.texts import Sizes, find_texts, text_run
from wellposed_studies.runs import FinishedRun, PlannedRun, depths_trained, train_grid
from wellposed_studies.verdicts import AGREED

MODELS = {
    "plain, no norm": Model("post_ln", norm="none"),
    "rezero": Model("rezero"),
    "lipschitz": Model("lipschitz"),
}


@dataclass(frozen=True)
class Deep:
    """A run and its certified total; infinite where it has none, or training diverged."""

    label: str
    run: FinishedRun
    total: float


def sizes_of(request: Request) -> Sizes:
    """Return what is trained at each depth."""
    return request.pick(
        toy=Sizes(3, 1, width=8, batch_size=4, examples=4, options={"max_words": 50}),
        mini=Sizes(100, 3, width=32),
        medium=Sizes(300, 3, width=64),
        paper=Sizes(3000, 3, width=128, heads=4, batch_size=64),
    )


def depth(request: Request) -> Reproduction:
    """Accuracy and certified total of each model at each depth."""
    sizes = sizes_of(request)
    depths = request.pick(
        toy=(1, 2), mini=(2, 8, 24, 64), medium=(2, 8, 24, 64), paper=(2, 4, 8, 16, 32, 64)
    )
    corpus, data = next(iter(find_texts(request).items()))
    labels, planned = [], []
    for layers, seed, label in itertools.product(depths, range(sizes.seeds), MODELS):
        folder = (
            request.runs("frontier-depth")
            / f"{label.replace(', ', '-').replace(' ', '')}-{layers}-seed{seed}"
        )
        config = MODELS[label].config(text_run(corpus, data, replace(sizes, layers=layers), seed))
        labels.append(label)
        planned.append(PlannedRun(folder, f"{label}, {layers} blocks, seed {seed}", config))
    runs = train_grid(request, planned)
    deep = [Deep(label, run, _total(run)) for label, run in zip(labels, runs, strict=True)]
    rows = [_row(corpus, found) for found in deep]
    trained = {
        label: depths_trained([found.run for found in deep if found.label == label], _trains)
        for label in MODELS
    }
    largest = {
        label: max(found.total for found in deep if found.label == label) for label in MODELS
    }
    said = [
        f"{label} trains at {', '.join(map(str, trained[label])) or 'no'} blocks, largest certified"
        f" total {largest[label]:.3g}"
        for label in MODELS
    ]
    return Reproduction(
        rows,
        _panels(rows),
        got=(
            f"{'; '.join(said)}; {corpus}, width {sizes.width}, {sizes.steps} steps, {sizes.seeds}"
            " seeds"
        ),
        holds=judge_depth(trained["lipschitz"], depths, largest["lipschitz"]),
        notes=(
            (
                "a depth trains where every seed's accuracy on valid is above that of the most"
                " frequent label"
            ),
        ),
        criterion=Criterion(
            "`lipschitz` trains at every depth, with a total of at most 1", sizes.seeds, AGREED
        ),
    )


def judge_depth(trained: Sequence[int], depths: Sequence[int], largest_total: float) -> bool:
    """Say whether `lipschitz` trains at every depth that was tried, with a total of at most 1."""
    return list(trained) == list(depths) and largest_total <= 1


def _trains(run: FinishedRun) -> bool:
    return run.metric("accuracy,valid", 0.0) > run.reference["accuracy"] if run.reference else False


def _total(run: FinishedRun) -> float:
    """Return the certified Lipschitz constant of a finished run, on a ball where there is none on
    all inputs."""
    if run.failure:
        return math.inf
    from wellposed.training import load_run_model
    from wellposed.training.certified.run import best_certificate

    return best_certificate(
        load_run_model(run.folder)[0], int(run.config.task_options["max_length"] or 0)
    ).total


def _row(corpus: str, found: Deep) -> Row:
    run = found.run
    return {
        "corpus": corpus,
        "model": found.label,
        "blocks": run.depth,
        "seed": run.seed,
        "accuracy": run.metric("accuracy,test"),
        "total": found.total,
        "trains": _trains(run),
        "error": run.failure,
    }


def _panels(rows: Sequence[Row]) -> list[Panel]:
    bounded = [row for row in rows if math.isfinite(row["total"])]
    accuracies = lines(rows, "blocks", "accuracy", by="model", style="dots")
    totals = lines(bounded, "blocks", "total", by="model", style="dots")
    return [
        Panel(
            "accuracy by depth, no norms", "blocks", "accuracy on test", accuracies, x_scale="log"
        ),
        Panel(
            "certified total by depth",
            "blocks",
            "Lipschitz constant",
            totals,
            x_scale="log",
            y_scale="log",
        ),
    ]
