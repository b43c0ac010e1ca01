"""Sengupta et al. (2023), figures 3, 5, 6 and 7: statistics of trained models over test texts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from wellposed.charts import Panel, Row, Series, lines, where
from wellposed.errors import ConfigError
from wellposed.measurement import correlate
from wellposed.recipes.recipe import Criterion, Reproduction, Request
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
from wellposed.recipes.sengupta2023.trained import (
    LABELS,
    SCALE_NOTE,
    Study,
    model_name,
    train_study,
    trained_model,
)
from wellposed.recipes.verdicts import UNCERTAINTY, every, inside, within

_MODELS = ("transject", "post_ln", "rezero", "orthogonal")
_MUCH_HIGHER = 1.5
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
    verdicts: list[bool | None] = []
    studies = _studies(request)
    for study in studies:
        found = _measured(request, replace(study, scale_embeddings=False), _MODELS)
        found |= _measured(request, study, _MODELS[1:])
        mine = [row for model, runs in found.items() for row in _layer_rows(study, model, [m for m, _ in runs])]
        rows += mine
        panels += [
            Panel(
                study.name,
                "layer",
                quantity,
                [_boxes(model, where(mine, quantity=quantity, model=model)) for model in found],
            )
            for quantity in ("activation factor, euclidean", "activation factor, cosine", "entropy")
        ]
        points = [
            (layers.median_factor(), layers.entropy(), score) for runs in found.values() for layers, score in runs
        ]
        factors, entropies = (
            {model: [of(layers) for layers, _ in runs] for model, runs in found.items()}
            for of in (Layers.median_factor, Layers.entropy)
        )
        said.append(
            f"{study.name}: median activation factor {_by_model(factors)}; entropy {_by_model(entropies)}"
            + _correlations(points)
        )
        verdicts.append(judge_figure_3a(*(factors[LABELS[name]] for name in ("transject", "post_ln"))))
    return Reproduction(
        rows,
        panels,
        got="; ".join(said),
        holds=every(verdicts),
        notes=(
            _NEIGHBOURS_NOTE,
            SCALE_NOTE,
            "-inf: some value occurs more often than there are neighbours, as TransJect's code of a position does in "
            "the embeddings of many texts, so that they have no density",
        ),
        criterion=Criterion(
            "at the last layer, on both tasks and without scaled embeddings, the median activation factor of TransJect "
            f"is within 0.9 to 1.1 and that of the Transformer at least {_MUCH_HIGHER:g} times as high",
            studies[0].sizes.seeds,
            UNCERTAINTY,
        ),
    )


def judge_figure_3a(transject: Sequence[float], transformer: Sequence[float]) -> bool | None:
    """Say whether TransJect keeps distances, and the Transformer's factor is much higher."""
    ratios = [plain / ours for plain, ours in zip(transformer, transject, strict=False)]
    return every((within(transject, 0.9, 1.1), within(ratios, low=_MUCH_HIGHER)))


def _by_model(values: dict[str, list[float]]) -> str:
    return ", ".join(f"{model} {plus_minus(_mean(of_seeds))}" for model, of_seeds in values.items())


def _mean(values: Sequence[float]) -> tuple[float, float | None]:
    mean, error = mean_and_error(values)
    return mean, error if math.isfinite(error) else None


def _measured(request: Request, study: Study, variants: Sequence[str]) -> dict[str, list[tuple[Layers, float]]]:
    """Train a study and return, for each model, what was measured and the test accuracy, seed by seed."""
    task, runs = train_study(request, study, variants=variants)
    batches = probe_batches(request, task)
    found: dict[str, list[tuple[Layers, float]]] = {}
    for run in runs:
        if run.metrics:
            measured = measure_layers(trained_model(run), batches)
            model = model_name(run.variant, scaled=study.scale_embeddings)
            found.setdefault(model, []).append((measured, 100 * run.metric("accuracy,test")))
    missing = {model_name(variant, scaled=study.scale_embeddings) for variant in variants}.difference(found)
    if missing:
        raise ConfigError(f"{study.name}: training diverged for {', '.join(sorted(missing))}")
    return found


def _layer_rows(study: Study, model: str, seeds: Sequence[Layers]) -> list[dict[str, Any]]:
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
                    "model": model,
                    "quantity": quantity,
                    "layer": layer,
                    "mean": fmean(values),
                    "lower_quartile": quantile(values, 0.25),
                    "median": quantile(values, 0.5),
                    "upper_quartile": quantile(values, 0.75),
                    "least": min(values),
                    "greatest": max(values),
                }
            )
    return rows


def _boxes(label: str, rows: Sequence[Row]) -> Series:
    """Return a box a layer: median, quartiles and extremes; layers where any of these is infinite have none."""
    names = ("median", "lower_quartile", "upper_quartile", "least", "greatest")
    drawn = [row for row in rows if all(math.isfinite(row[name]) for name in names)]
    median, lower, upper, least, greatest = ([row[name] for row in drawn] for name in names)
    return Series(
        label, [row["layer"] for row in drawn], median, "boxes", band=(lower, upper), whiskers=(least, greatest)
    )


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
    drawn = [_part_boxes(model, where(rows, model=model)) for model in dict.fromkeys(row["model"] for row in rows)]
    panels = [Panel("entropy of heads and experts", "layer", "entropy (nats)", drawn)]
    experts, heads = (means[variant] for variant in ("transject", "post_ln"))
    return Reproduction(
        rows,
        panels,
        got=f"mean entropy of experts {plus_minus(_mean(experts))}, of heads {plus_minus(_mean(heads))} nats (over "
        "seeds)",
        holds=judge_figure_3b(experts, heads),
        criterion=Criterion("the mean entropy of experts is below that of heads", len(experts), UNCERTAINTY),
        notes=(
            _NEIGHBOURS_NOTE,
            "heads are narrower than experts, so their entropy rests on fewer values; drawn: parts of all seeds",
        ),
    )


def _part_boxes(label: str, rows: Sequence[Row]) -> Series:
    """Return a box a layer over the entropies of its heads or experts."""
    layers: dict[int, list[float]] = {}
    for row in rows:
        layers.setdefault(row["layer"], []).append(row["entropy"])
    shares = (("least", 0.0), ("lower_quartile", 0.25), ("median", 0.5), ("upper_quartile", 0.75), ("greatest", 1.0))
    boxes = [{"layer": k, **{name: quantile(v, share) for name, share in shares}} for k, v in layers.items()]
    return _boxes(label, boxes)


def judge_figure_3b(experts: Sequence[float], heads: Sequence[float]) -> bool | None:
    """Say whether experts have the lower entropy, seed by seed."""
    return within([expert - head for expert, head in zip(experts, heads, strict=True)], high=0)


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
    weights = [row["alpha_over_layers"] for row in rows]
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
        got=f"largest |alpha| / L {max(map(abs, weights)):.3f} over {len(rows)} layers",
        holds=judge_figure_5(weights),
        criterion=Criterion(
            "|alpha| / L is below 0.33 in every layer of every seed",
            len({row["seed"] for row in rows}),
            "every seed must agree",
        ),
        notes=(
            "alpha = tanh(w), of either sign, zero at the start (ReZero); the paper's sigmoid starts at one half",
            "|alpha| / L cannot reach 1 / L, which is 0.5 at two layers and 0.17 at the paper's six",
        ),
    )


def judge_figure_5(weights: Sequence[float]) -> bool:
    """Say whether every residual weight stays below a third."""
    return max(map(abs, weights)) < 0.33


def figure_6(request: Request) -> Reproduction:
    """Activation factor at the last layer and entropy against experts, layers and dropout."""
    study = text_study(request, "imdb")
    experts, layers, dropouts = request.pick(
        toy=((1, 2), (1, 2), (0.0, 0.3)),
        mini=((1, 4, 8), (1, 2, 4), (0.0, 0.2, 0.4)),
        medium=((1, 4, 8), (1, 2, 4), (0.0, 0.2, 0.4)),
        paper=((1, 2, 4, 8), (2, 4, 6), (0.0, 0.1, 0.2, 0.4)),
    )
    unscaled = replace(study, scale_embeddings=False)
    grid = [
        (unscaled, "transject", "experts", experts),
        (unscaled, "transject", "layers", layers),
        *((of, "post_ln", "layers", layers) for of in (unscaled, study)),
        *((of, "post_ln", "dropout", dropouts) for of in (unscaled, study)),
    ]
    rows: list[dict[str, Any]] = []
    panels: list[Panel] = []
    change: dict[tuple[str, str], tuple[float, float]] = {}
    for of, variant, option, values in grid:
        model = model_name(variant, scaled=of.scale_embeddings)
        mine = [_configured(request, of, variant, option, value) for value in values]
        rows += mine
        trained = [row for row in mine if row["trained"]]
        change[model, option] = _change(trained)
        points = [row["value"] for row in trained], [row["activation_factor"] for row in trained]
        title, y_label = f"{model}: {option}", "median activation factor, last layer"
        panels.append(Panel(title, option, y_label, [Series("factor", *points)], legend=False))
    return Reproduction(
        rows,
        panels,
        got="change of the activation factor from the smallest to the largest value: "
        + ", ".join(
            f"{model}: {option} {value:+.2f} +- {error:.2f}" for (model, option), (value, error) in change.items()
        ),
        holds=judge_figure_6(change),
        notes=(_NEIGHBOURS_NOTE, SCALE_NOTE, "dropout also on the embeddings"),
        criterion=Criterion(
            "from the smallest to the largest value tried and without scaled embeddings, experts raise the activation "
            "factor of TransJect, layers raise that of the Transformer by more than they change TransJect's, and "
            "dropout lowers the Transformer's",
            study.sizes.seeds,
            UNCERTAINTY,
        ),
    )


def judge_figure_6(change: Mapping[tuple[str, str], tuple[float, float]]) -> bool | None:
    """Say whether experts, layers and dropout move the activation factor as the paper says."""
    deeper, deeper_error = change[LABELS["post_ln"], "layers"]
    ours, our_error = change[LABELS["transject"], "layers"]
    return every(
        (
            inside(*change[LABELS["transject"], "experts"], low=0),
            inside(deeper - abs(ours), math.hypot(deeper_error, our_error), low=0),
            inside(*change[LABELS["post_ln"], "dropout"], high=0),
        )
    )


def _configured(request: Request, study: Study, variant: str, option: str, value: float) -> dict[str, Any]:
    """Train one configuration of figure 6 with every seed and return its row: means, and the error of the factor."""
    changed = replace(study, name=f"{study.name}-{option}{value:g}", sizes=replace(study.sizes, **{option: value}))
    task, runs = train_study(request, changed, variants=(variant,))
    batches = probe_batches(request, task)
    trained = [run for run in runs if run.metrics]
    found = [measure_layers(trained_model(run), batches) for run in trained]
    model = model_name(variant, scaled=study.scale_embeddings)
    row: dict[str, Any] = {"model": model, "option": option, "value": value, "trained": len(trained)}
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
        everything = list(itertools.chain(*pooled.values()))
        reach = min(everything), max(everything)
        series = [_histogram(f"layer {layer}", values, reach) for layer, values in pooled.items()]
        panels.append(Panel(study.name, "expert weight", "share of weights", series))
    means = [row["mean_weight"] for row in rows]
    return Reproduction(
        rows,
        panels,
        got=f"mean weight of an expert between {min(means):.3f} and {max(means):.3f}, {even:.2f} being even",
        holds=judge_figure_7(means, even),
        criterion=Criterion(
            "the mean weight of every expert, in every layer of every seed, is within a factor 2 of even",
            len({row["seed"] for row in rows}),
            "every seed must agree",
        ),
    )


def judge_figure_7(means: Sequence[float], even: float) -> bool:
    """Say whether every expert is used about evenly."""
    return max(means) < 2 * even and min(means) > even / 2


def _histogram(label: str, values: Sequence[float], reach: tuple[float, float], bins: int = 20) -> Series:
    """Return the share of values in each part of ``reach``."""
    counts, edges = np.histogram(values, bins, range=reach)
    return Series(label, ((edges[:-1] + edges[1:]) / 2).tolist(), (counts / len(values)).tolist(), "bars")
