"""Sengupta et al. (2023), figure 7: weights of the experts over test texts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from wellposed.charts import Panel, Series
from wellposed.recipes.recipe import Criterion, Reproduction, Request
from wellposed_studies.sengupta2023.measured import figure_studies
from wellposed_studies.sengupta2023.printed import GATE_MODE
from wellposed_studies.sengupta2023.states import gate_weights, probe_batches, quantile
from wellposed_studies.sengupta2023.trained import train_study, trained_model
from wellposed_studies.verdicts import AGREED

_TAIL = 0.005


def figure_7(request: Request) -> Reproduction:
    """Histogram of expert weights over test texts, by layer."""
    rows: list[dict[str, Any]] = []
    panels: list[Panel] = []
    even = 1.0
    for study in figure_studies(request):
        task, runs = train_study(request, study, variants=("transject",))
        batches = probe_batches(request, task)
        pooled: dict[int, list[float]] = {}
        for run in runs:
            for layer, weights in enumerate(gate_weights(trained_model(run), batches), start=1):
                pooled.setdefault(layer, []).extend(itertools.chain(*weights))
                even = 1 / len(weights[0])
                rows += [
                    {
                        "task": study.name,
                        "seed": run.seed,
                        "layer": layer,
                        "expert": expert,
                        "mean_weight": fmean(of_expert),
                        "lower_quartile": quantile(of_expert, 0.25),
                        "upper_quartile": quantile(of_expert, 0.75),
                    }
                    for expert, of_expert in enumerate(zip(*weights, strict=True), start=1)
                ]
        everything = list(itertools.chain(*pooled.values()))
        reach = (
            quantile([*everything, GATE_MODE], _TAIL),
            quantile([*everything, GATE_MODE], 1 - _TAIL),
        )
        series = [_histogram(f"layer {layer}", values, reach) for layer, values in pooled.items()]
        highest = max(max(bars.y) for bars in series)
        series.append(
            Series(
                f"paper: mode about {GATE_MODE:g}", [GATE_MODE, GATE_MODE], [0, highest], "dashed"
            )
        )
        panels.append(Panel(study.name, "expert weight", "share of weights", series))
    means = [row["mean_weight"] for row in rows]
    return Reproduction(
        rows,
        panels,
        got=(
            f"mean weight of an expert between {min(means):.3f} and {max(means):.3f}, {even:.2f}"
            " being even"
        ),
        holds=judge_figure_7(means, even),
        criterion=Criterion(
            "the mean weight of every expert, in every layer of every seed, is within a factor 2 of"
            " even",
            len({row["seed"] for row in rows}),
            AGREED,
        ),
        notes=(f"drawn: all but the {_TAIL:.1%} of weights at either end",),
    )


def judge_figure_7(means: Sequence[float], even: float) -> bool:
    """Say whether every expert is used about evenly."""
    return max(means) < 2 * even and min(means) > even / 2


def _histogram(
    label: str, values: Sequence[float], reach: tuple[float, float], bins: int = 20
) -> Series:
    """Return the share of values in each part of ``reach``."""
    counts, edges = np.histogram(values, bins, range=reach)
    return Series(
        label, ((edges[:-1] + edges[1:]) / 2).tolist(), (counts / len(values)).tolist(), "bars"
    )
