"""Sengupta et al. (2023), figures 3, 5, 6 and 7: statistics of trained models over test texts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from wellposed.charts import Panel, Series, lines, where
from wellposed.errors import ConfigError
from wellposed.measurement import correlate
from wellposed.recipes.recipe import Reproduction, Request
from wellposed.recipes.runs import mean_and_error, plus_minus
from wellposed.recipes.sengupta2023.states import (
    METRICS,
    Layers,
    gate_weights,
    measure_layers,
    part_entropies,
    probe_batches,
    quantile,
    residual_weights,
)
from wellposed.recipes.sengupta2023.studies import arena_study, text_study
from wellposed.recipes.sengupta2023.trained import LABELS, Study, train_study, trained_model

_MODELS = ("transject", "post_ln", "rezero", "orthogonal")
_NEIGHBOURS_NOTE = (
    "entropies in nats by the three nearest neighbours; the paper names no estimator; entropy depends on scale"
)


def _studies(request: Request) -> list[Study]:
    return [text_study(request, "imdb"), arena_study(request, "text")]


def figure_3a(request: Request) -> Reproduction:
    """Activation factor (three distances) and entropy by layer, and the correlations of section 5."""
    rows: list[dict[str, Any]] = []
    panels: list[Panel] = []
    said: list[str] = []
    holds = True
    for study in _studies(request):
        found = _measured(request, study)
        mine = [row for variant, runs in found.items() for row in _layer_rows(study, variant, [m for m, _ in runs])]
        rows += mine
        panels += [
            Panel(
                study.name,
                "layer",
                f"median {quantity}",
                lines(where(mine, quantity=quantity), "layer", "median", by="model"),
            )
            for quantity in ("activation factor, euclidean", "activation factor, cosine", "entropy")
        ]
        points = [
            (layers.median_factor(), layers.entropy(), score) for runs in found.values() for layers, score in runs
        ]
        factors, entropies = (
            {variant: fmean(of(layers) for layers, _ in runs) for variant, runs in found.items()}
            for of in (Layers.median_factor, Layers.entropy)
        )
        said.append(
            f"{study.name}: median activation factor {_by_model(factors)}; entropy {_by_model(entropies)}"
            + _correlations(points)
        )
        holds = holds and 0.9 <= factors["transject"] <= 1.1 and factors["post_ln"] > factors["transject"]
    return Reproduction(
        rows,
        panels,
        got="; ".join(said),
        holds=holds,
        notes=(
            _NEIGHBOURS_NOTE,
            "-inf: some value occurs more often than there are neighbours, as TransJect's code of a position does in "
            "the embeddings of many texts, so that they have no density",
            "the claim is taken as: TransJect within 0.9 to 1.1 and below Transformer, at the last layer",
        ),
    )


def _by_model(values: dict[str, float]) -> str:
    return ", ".join(f"{LABELS[variant]} {value:.2f}" for variant, value in values.items())


def _measured(request: Request, study: Study) -> dict[str, list[tuple[Layers, float]]]:
    """Train a study and return, for each model, what was measured and the test accuracy, seed by seed."""
    task, runs = train_study(request, study, variants=_MODELS)
    batches = probe_batches(request, task)
    found: dict[str, list[tuple[Layers, float]]] = {}
    for run in runs:
        if run.metrics:
            measured = measure_layers(trained_model(run), batches)
            found.setdefault(run.variant, []).append((measured, 100 * run.metric("accuracy,test")))
    if set(found) != set(_MODELS):
        raise ConfigError(f"{study.name}: training diverged for {', '.join(sorted(set(_MODELS) - set(found)))}")
    return found


def _layer_rows(study: Study, variant: str, seeds: Sequence[Layers]) -> list[dict[str, Any]]:
    """Return quartiles over the sequences of all seeds, for each layer of each quantity."""
    quantities = [(f"activation factor, {m}", 1, [layers.factors[m] for layers in seeds]) for m in METRICS]
    quantities.append(("entropy", 0, [layers.entropies for layers in seeds]))
    quantities.append(("entropy, standardized", 0, [layers.standardized for layers in seeds]))
    rows = []
    for quantity, first, by_seed in quantities:
        for layer, of_layer in enumerate(zip(*by_seed, strict=True), start=first):
            values = [value for seed in of_layer for value in seed]
            rows.append(
                {
                    "task": study.name,
                    "model": LABELS.get(variant, variant),
                    "quantity": quantity,
                    "layer": layer,
                    "mean": fmean(values),
                    "lower_quartile": quantile(values, 0.25),
                    "median": quantile(values, 0.5),
                    "upper_quartile": quantile(values, 0.75),
                }
            )
    return rows


def _correlations(points: Sequence[tuple[float, float, float]]) -> str:
    """Say the correlations over models and seeds, where the numbers vary."""
    if len(points) < 3 or any(min(column) == max(column) for column in zip(*points, strict=True)):
        return ""
    factor, entropy, accuracy = zip(*points, strict=True)
    with_accuracy = correlate(factor, accuracy, names=("activation factor", "accuracy"))
    with_entropy = correlate(factor, entropy, names=("activation factor", "entropy"))
    return (
        f"; r(factor, accuracy) {with_accuracy.pearson:.2f} (p {with_accuracy.p_value:.2f}), "
        f"Spearman(factor, entropy) {with_entropy.spearman:.2f} (n = {with_accuracy.n})"
    )


def figure_3b(request: Request) -> Reproduction:
    """Entropy of each head of the Transformer and each expert of TransJect, by layer."""
    task, runs = train_study(request, text_study(request, "imdb"), variants=("transject", "post_ln"))
    batches = probe_batches(request, task)
    rows: list[dict[str, Any]] = []
    means: dict[str, list[float]] = {}
    for run in runs:
        kind = "expert" if run.variant == "transject" else "head"
        layers = part_entropies(trained_model(run), batches)
        for layer, values in enumerate(layers, start=1):
            common = {"model": LABELS[run.variant], "seed": run.seed, "layer": layer}
            rows += [{**common, "part": f"{kind} {part}", "entropy": v} for part, v in enumerate(values, start=1)]
        means.setdefault(run.variant, []).append(fmean(itertools.chain(*layers)))
    drawn = where(rows, seed=0)
    panels = [
        Panel(model, "layer", "entropy (nats)", lines(where(drawn, model=model), "layer", "entropy", by="part"))
        for model in dict.fromkeys(row["model"] for row in drawn)
    ]
    experts, heads = (mean_and_error(means[variant]) for variant in ("transject", "post_ln"))
    return Reproduction(
        rows,
        panels,
        got=f"mean entropy of experts {plus_minus(experts)}, of heads {plus_minus(heads)} nats (over seeds)",
        holds=experts[0] < heads[0],
        notes=(
            _NEIGHBOURS_NOTE,
            "heads are narrower than experts, so their entropy rests on fewer values; drawn: seed 0",
        ),
    )


def figure_5(request: Request) -> Reproduction:
    """Residual weights alpha_l / L of trained TransJect models."""
    rows: list[dict[str, Any]] = []
    for study in _studies(request):
        _, runs = train_study(request, study, variants=("transject",))
        for run in runs:
            alphas = residual_weights(trained_model(run))
            common = {"task": study.name, "seed": run.seed}
            rows += [
                {**common, "layer": layer, "alpha": alpha, "alpha_over_layers": alpha / len(alphas)}
                for layer, alpha in enumerate(alphas, start=1)
            ]
    largest = max(abs(row["alpha_over_layers"]) for row in rows)
    panels = [
        Panel(
            task,
            "layer",
            "alpha / L",
            lines(where(rows, task=task), "layer", "alpha_over_layers", by=lambda row: f"seed {row['seed']}"),
        )
        for task in dict.fromkeys(row["task"] for row in rows)
    ]
    return Reproduction(
        rows,
        panels,
        got=f"largest |alpha| / L {largest:.3f} over {len(rows)} layers",
        holds=largest < 0.33,
        notes=(
            "alpha = tanh(w), of either sign, zero at the start (ReZero); the paper's sigmoid starts at one half",
            "|alpha| / L cannot reach 1 / L, which is 0.5 at two layers and 0.17 at the paper's six",
        ),
    )


def figure_6(request: Request) -> Reproduction:
    """Activation factor at the last layer and entropy against experts, layers and dropout."""
    study = text_study(request, "imdb")
    experts, layers, dropouts = request.pick(
        toy=((1, 2), (1, 2), (0.0, 0.3)),
        mini=((1, 4, 8), (1, 2, 4), (0.0, 0.2, 0.4)),
        paper=((1, 2, 4, 8), (2, 4, 6), (0.0, 0.1, 0.2, 0.4)),
    )
    grid = {
        ("transject", "experts"): experts,
        ("transject", "layers"): layers,
        ("post_ln", "layers"): layers,
        ("post_ln", "dropout"): dropouts,
    }
    rows: list[dict[str, Any]] = []
    panels: list[Panel] = []
    change: dict[tuple[str, str], tuple[float, float]] = {}
    for (variant, option), values in grid.items():
        mine = [_configured(request, study, variant, option, value) for value in values]
        rows += mine
        trained = [row for row in mine if row["trained"]]
        change[variant, option] = _change(trained)
        points = [row["value"] for row in trained], [row["activation_factor"] for row in trained]
        title, y_label = f"{LABELS[variant]}: {option}", "median activation factor, last layer"
        panels.append(Panel(title, option, y_label, [Series("factor", *points)], legend=False))
    finite = all(math.isfinite(value) for value, _ in change.values())
    holds = (
        change["transject", "experts"][0] > 0
        and change["post_ln", "layers"][0] > abs(change["transject", "layers"][0])
        and change["post_ln", "dropout"][0] < 0
    )
    return Reproduction(
        rows,
        panels,
        got="change of the activation factor from the smallest to the largest value: "
        + ", ".join(
            f"{LABELS[variant]}, {option} {value:+.2f} +- {error:.2f}"
            for (variant, option), (value, error) in change.items()
        ),
        holds=holds if finite else None,
        notes=(_NEIGHBOURS_NOTE, f"{study.sizes.seeds} seeds for each configuration; dropout also on the embeddings"),
    )


def _configured(request: Request, study: Study, variant: str, option: str, value: float) -> dict[str, Any]:
    """Train one configuration of figure 6 with every seed and return its row: means, and the error of the factor."""
    changed = replace(study, name=f"{study.name}-{option}{value:g}", sizes=replace(study.sizes, **{option: value}))
    task, runs = train_study(request, changed, variants=(variant,))
    batches = probe_batches(request, task)
    trained = [run for run in runs if run.metrics]
    found = [measure_layers(trained_model(run), batches) for run in trained]
    row: dict[str, Any] = {"model": LABELS[variant], "option": option, "value": value, "trained": len(trained)}
    if not trained:
        return row
    factor, error = mean_and_error([layers.median_factor() for layers in found])
    return {
        **row,
        "activation_factor": factor,
        "standard_error": error,
        "entropy": fmean(layers.entropy() for layers in found),
        "entropy_standardized": fmean(layers.entropy(standardized=True) for layers in found),
        "accuracy": 100 * fmean(run.metric("accuracy,test") for run in trained),
    }


def _change(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return the factor at the largest value minus that at the smallest, and its standard error."""
    if len(rows) < 2:
        return math.nan, math.nan
    first, last = rows[0], rows[-1]
    error = math.hypot(first["standard_error"], last["standard_error"])
    return last["activation_factor"] - first["activation_factor"], error


def figure_7(request: Request) -> Reproduction:
    """Histogram of expert weights over test texts, by layer."""
    rows: list[dict[str, Any]] = []
    panels: list[Panel] = []
    even = 1.0
    for study in _studies(request):
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
        series = [_histogram(f"layer {layer}", values) for layer, values in pooled.items()]
        panels.append(Panel(study.name, "expert weight", "share of weights", series))
    means = [row["mean_weight"] for row in rows]
    return Reproduction(
        rows,
        panels,
        got=f"mean weight of an expert between {min(means):.3f} and {max(means):.3f}, {even:.2f} being even",
        holds=max(means) < 2 * even and min(means) > even / 2,
        notes=("the claim is taken as: every expert's mean weight is within a factor 2 of even",),
    )


def _histogram(label: str, values: Sequence[float], bins: int = 20) -> Series:
    """Return the share of values in each part of [0, 1]."""
    counts, edges = np.histogram(values, bins, range=(0, 1))
    return Series(label, ((edges[:-1] + edges[1:]) / 2).tolist(), (counts / len(values)).tolist(), "bars")
