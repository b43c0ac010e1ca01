"""Sengupta et al. (2023): activation factor and entropy against experts, layers and dropout, and
models without one of their parts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from wellposed.charts import Panel, Row, where
from wellposed.recipes.recipe import Reproduction, Request, recipe
from wellposed_studies.sengupta2023.layers import FACTORS, NEIGHBOURS_NOTE
from wellposed_studies.sengupta2023.states import measure_layers, probe_batches
from wellposed_studies.sengupta2023.trained import (
    LABELS,
    ONE_EXPERT,
    ONE_HEAD,
    SCALE_NOTE,
    Study,
    text_study,
    train_study,
    tuned_study,
)
from wellposed_studies.study import FinishedRun, judged, mean_and_error, mean_series, minus, said
from wellposed_studies.verdicts import agreed, every, within

_SWEPT = (
    ("transject", "experts"),
    ("transject", "layers"),
    ("post_ln", "layers"),
    ("post_ln", "dropout"),
)
_QUANTITIES = {
    "activation_factor": "median activation factor, last layer",
    "entropy": "entropy, mean of layers",
}
Changes = Mapping[tuple[str, str], Sequence[float]]
"""What an option does to a model, seed by seed."""


@recipe("sengupta2023/figure-6", estimated={"mini": 20, "medium": 520}, **FACTORS)
def figure_6(request: Request) -> Reproduction:
    """Activation factor and entropy against experts, layers and dropout (data: imdb).

    Claim: more experts raise the activation at the last layer; more layers raise it for
    Transformer and not for TransJect; more dropout lowers activation and entropy of Transformer

    Quote: "more experts in MOE increase activation at the final layer" (appendix C)

    Test: from the smallest to the largest value tried, experts raise the activation factor of
    TransJect, layers raise that of the Transformer by more than they change TransJect's, and
    dropout lowers the Transformer's; cannot be said where the scales of embeddings disagree

    Note: dropout also on the embeddings
    """
    study = text_study(request, "imdb")
    tried = {"experts": (1, 4, 8), "layers": (1, 2, 4), "dropout": (0.0, 0.2, 0.4)}
    if request.scale == "toy":
        tried = {"experts": (1, 2), "layers": (1, 2), "dropout": (0.0, 0.3)}
    rows: list[Row] = []
    runs: list[FinishedRun] = []
    change: dict[tuple[str, str], list[float]] = {}
    task, _ = train_study(request, study, variants=("transject",), seeds=())
    batches = probe_batches(request, task)
    for variant, option in _SWEPT:
        for of in study.scales()[: 1 if variant == "transject" else 2]:
            kept, ends = tuned_study(request, of, task, (variant,)), []
            for value in tried[option]:
                changed = kept.resized(f"{option}{value:g}", **{option: value})
                _, trained = train_study(request, changed, variants=(variant,), task=task)
                runs += trained
                mine = [
                    {
                        "model": of.model_name(variant),
                        "option": option,
                        "value": value,
                        "seed": run.seed,
                        "activation_factor": layers.median_factor(),
                        "entropy": layers.entropy(),
                        "accuracy": 100 * run.metric("accuracy,test"),
                    }
                    for run in trained
                    if run.metrics
                    for layers in [measure_layers(run.model, batches)]
                ]
                rows += mine
                ends.append([row["activation_factor"] for row in mine])
            alike = len(ends[0]) == len(ends[-1])
            change[of.model_name(variant), option] = minus(ends[-1], ends[0]) if alike else []
    panels = []
    for (quantity, title), (variant, option) in itertools.product(_QUANTITIES.items(), _SWEPT):
        names = dict.fromkeys(of.model_name(variant) for of in study.scales())
        series = [
            mean_series(where(rows, model=name, option=option), "value", quantity, name)
            for name in names
        ]
        panels.append(Panel(f"{LABELS[variant]}: {option}", option, title, series))
    texts = [f"{model}: {option} {said(of)}" for (model, option), of in change.items() if of]
    got = (
        "change of the activation factor from the smallest to the largest value:"
        f" {', '.join(texts)}"
    )
    holds = agreed([judge_figure_6(change, of.model_name("post_ln")) for of in study.scales()])
    return judged(request, rows, panels, got, holds, runs, notes=(NEIGHBOURS_NOTE, SCALE_NOTE))


def judge_figure_6(change: Changes, plain: str) -> bool | None:
    """Say whether experts, layers and dropout move the activation factor as the paper says, of a
    Transformer by its name."""
    ours = [abs(of) for of in change[LABELS["transject"], "layers"]]
    deeper = change[plain, "layers"]
    return every(
        (
            within(change[LABELS["transject"], "experts"], low=0),
            within(minus(deeper, ours) if len(deeper) == len(ours) else [], low=0),
            within(change[plain, "dropout"], high=0),
        )
    )


def ablations(request: Request, study: Study) -> tuple[list[Row], str]:
    """Return rows and words on the Transformer with one head and TransJect with one expert on IMDb,
    trained at the rate of the whole model, less that of the same seed; nothing on another task."""
    rows: list[Row] = []
    texts = []
    for variant, option, split, printed in (
        ("post_ln", "heads", "test", ONE_HEAD),
        ("transject", "experts", "valid", ONE_EXPERT),
    ):
        if study.name != "imdb":
            continue
        task, whole = train_study(request, study, variants=(variant,))
        changed = tuned_study(request, study, task, (variant,)).resized(f"{option}1", **{option: 1})
        _, runs = train_study(request, changed, variants=(variant,), task=task)
        scores, before = (
            [100 * run.metric(f"accuracy,{split}") for run in of] for of in (runs, whole)
        )
        label, changes = f"{LABELS[variant]}, one {option[:-1]}", minus(scores, before)
        row: Row = {"task": "imdb", "model": label, "split": split, "paper_change": printed}
        (score, error), (mean, width) = mean_and_error(scores), mean_and_error(changes)
        row |= {"ours": score, "standard_error": error, "change": mean, "change_error": width}
        rows.append({**row, "seeds": " ".join(f"{value:.2f}" for value in scores)})
        verdict = {True: "a loss", False: "no loss", None: "cannot be said"}[
            within(changes, high=0)
        ]
        points = f"{said(changes)} points, paper {printed:g}"
        texts.append(f"; {label} ({split}) {points}: {verdict}")
    return rows, "".join(texts)
