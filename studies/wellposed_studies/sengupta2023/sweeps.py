"""Sengupta et al. (2023), figure 6: activation factor and entropy against experts, depth and dropout."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from wellposed_lab.charts import Panel, Row, where
from wellposed_studies.recipe import Reproduction, Request, Verdict, recipe
from wellposed_studies.sengupta2023.layers import FACTORS, NEIGHBOURS_NOTE
from wellposed_studies.sengupta2023.states import measure_layers, probe_batches
from wellposed_studies.sengupta2023.trained import (
    LABELS,
    SCALE_NOTE,
    text_study,
    train_study,
    tuned_study,
)
from wellposed_studies.study import FinishedRun, judged, mean_series, minus, said
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
"""Change of a quantity per seed, by model and option."""


@recipe("sengupta2023/figure-6", **FACTORS)
def figure_6(request: Request) -> Reproduction:
    """Activation factor and entropy against experts, layers and dropout (data: imdb).

    Claim: more experts raise the activation at the last layer. More layers raise it for Transformer
        and not for TransJect. More dropout lowers activation and entropy of Transformer.
    Quote: "more experts in MOE increase activation at the final layer" (appendix C).
    Test: each option goes from the smallest to the largest value tried. Experts raise the
        activation factor of TransJect, and dropout lowers the Transformer's. Layers raise that of
        the Transformer by more than they change TransJect's. Undecided if the scales of embeddings
        disagree. If the Transformer's own numbers contradict, TransJect is not judged.
    Note: dropout also on the embeddings. At mini scale every model trains for twice the steps of
        table 1, as some seeds of TransJect were still learning after as many.
    """
    study = text_study(request, "imdb")
    steps = study.sizes.steps * (2 if request.scale == "mini" else 1)
    tried = {"experts": (1, 4, 8), "layers": (1, 2, 4), "dropout": (0.0, 0.2, 0.4)}
    if request.scale == "toy":
        tried = {"experts": (1, 2), "layers": (1, 2), "dropout": (0.0, 0.3)}
    rows: list[Row] = []
    runs: list[FinishedRun] = []
    change: dict[tuple[str, str], list[float]] = {}
    task, _ = train_study(request, study, variants=("transject",), seeds=())
    batches = probe_batches(request, task)
    for variant, option in _SWEPT:
        for scale in study.scales()[: 1 if variant == "transject" else 2]:
            tuned = tuned_study(request, scale, task, (variant,))
            ends = []
            for value in tried[option]:
                changed = tuned.resized(f"{option}{value:g}", **{option: value, "steps": steps})
                _, trained = train_study(request, changed, variants=(variant,), task=task)
                runs += trained
                mine = [
                    {
                        "model": scale.model_name(variant),
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
            change[scale.model_name(variant), option] = minus(ends[-1], ends[0]) if alike else []
    panels = []
    for (quantity, title), (variant, option) in itertools.product(_QUANTITIES.items(), _SWEPT):
        names = dict.fromkeys(scale.model_name(variant) for scale in study.scales())
        series = [
            mean_series(where(rows, model=name, option=option), "value", quantity, name)
            for name in names
        ]
        panels.append(Panel(f"{LABELS[variant]}: {option}", option, title, series))
    texts = [
        f"{model}: {option} {said(values)}" for (model, option), values in change.items() if values
    ]
    got = f"change of the activation factor from smallest to largest value: {', '.join(texts)}"
    plains = [scale.model_name("post_ln") for scale in study.scales()]
    holds = agreed([judge_figure_6(change, plain) for plain in plains])
    if agreed([judge_transformer(change, plain) for plain in plains]) is False:
        runs = [run for run in runs if run.variant == "post_ln"]
    return judged(request, rows, panels, got, holds, runs, notes=(NEIGHBOURS_NOTE, SCALE_NOTE))


def judge_transformer(change: Changes, plain: str) -> Verdict:
    """Return whether layers raise the Transformer's factor, and dropout lowers it."""
    return every((within(change[plain, "layers"], low=0), within(change[plain, "dropout"], high=0)))


def judge_figure_6(change: Changes, plain: str) -> Verdict:
    ours = [abs(value) for value in change[LABELS["transject"], "layers"]]
    deeper = change[plain, "layers"]
    return every(
        (
            within(change[LABELS["transject"], "experts"], low=0),
            within(minus(deeper, ours) if len(deeper) == len(ours) else [], low=0),
            within(change[plain, "dropout"], high=0),
        )
    )
