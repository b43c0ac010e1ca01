"""Sengupta et al. (2023), figures 3, 5, 6 and 7: statistics of trained models over test texts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from wellposed.charts import Panel, Series
from wellposed.errors import ConfigError
from wellposed.measurement import correlate
from wellposed.recipes.recipe import Reproduction, Request
from wellposed.recipes.sengupta2023.states import (
    METRICS,
    Layers,
    gate_weights,
    measure_layers,
    part_entropies,
    probe_batches,
    probe_count,
    quantile,
    residual_weights,
    trained_model,
)
from wellposed.recipes.sengupta2023.studies import arena_study, text_study
from wellposed.recipes.sengupta2023.trained import LABELS, Study, mean_and_error, train_study

_MODELS = ("transject", "post_ln", "rezero", "orthogonal")
_BOXES = (0.25, 0.5, 0.75)
_KNN = "entropies in nats by the three nearest neighbours; the paper names no estimator; entropy depends on scale"


def _studies(request: Request) -> list[Study]:
    return [text_study(request, "imdb"), arena_study(request, "text")]


def figure_3a(request: Request) -> Reproduction:
    """Activation factor (three distances) and entropy by layer, and the correlations of section 5."""
    rows: list[dict[str, Any]] = []
    panels: list[Panel] = []
    said: list[str] = []
    factors: dict[tuple[str, str], float] = {}
    for study in _studies(request):
        found = _measured(request, study)
        points = []
        for variant, layers in found.items():
            rows += _layer_rows(study, variant, [measured for measured, _ in layers])
            for measured, accuracy in layers:
                points.append((measured.median_factor(), measured.entropy(), accuracy))
            factors[study.name, variant] = _mean([measured.median_factor() for measured, _ in layers])
        panels += _layer_panels(study, rows)
        said.append(
            f"{study.name}: median activation factor "
            + ", ".join(f"{LABELS[variant]} {factors[study.name, variant]:.2f}" for variant in found)
            + "; entropy "
            + ", ".join(
                f"{LABELS[variant]} {_mean([measured.entropy() for measured, _ in layers]):.2f}"
                for variant, layers in found.items()
            )
            + _correlations(points)
        )
    ours = [value for (_, variant), value in factors.items() if variant == "transject"]
    plain = [value for (_, variant), value in factors.items() if variant == "post_ln"]
    holds = all(0.9 <= value <= 1.1 for value in ours) and all(
        other > value for value, other in zip(ours, plain, strict=True)
    )
    return Reproduction(
        rows,
        panels,
        got="; ".join(said),
        holds=None if request.scale == "toy" else holds,
        notes=(
            _KNN,
            "-inf: some value occurs more often than there are neighbours, as TransJect's code of a position does in "
            "the embeddings of many texts, so that they have no density",
            "the claim is taken as: TransJect within 0.9 to 1.1 and below Transformer, at the last layer",
        ),
    )


def _measured(request: Request, study: Study) -> dict[str, list[tuple[Layers, float]]]:
    """Train a study and return, for each model, what was measured and the test accuracy, seed by seed."""
    task, runs = train_study(request, study, variants=_MODELS)
    batches = probe_batches(task, probe_count(request))
    found: dict[str, list[tuple[Layers, float]]] = {}
    for run in runs:
        if run.metrics:
            measured = measure_layers(trained_model(run), batches)
            found.setdefault(run.variant, []).append((measured, 100 * run.metric("accuracy,test")))
    if set(found) != set(_MODELS):
        raise ConfigError(f"{study.name}: training diverged for {', '.join(sorted(set(_MODELS) - set(found)))}")
    return found


def _layer_rows(study: Study, variant: str, layers: Sequence[Layers]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for metric in METRICS:
        for layer in range(len(layers[0].factors[metric])):
            values = [value for measured in layers for value in measured.factors[metric][layer]]
            rows.append(_box(study, variant, f"activation factor, {metric}", layer + 1, values))
    for name, standardized in (("entropy", False), ("entropy, standardized", True)):
        for layer in range(len(layers[0].entropies)):
            values = [
                value
                for measured in layers
                for value in (measured.standardized if standardized else measured.entropies)[layer]
            ]
            rows.append(_box(study, variant, name, layer, values))
    return rows


def _box(study: Study, variant: str, quantity: str, layer: int, values: Sequence[float]) -> dict[str, Any]:
    low, middle, high = (quantile(values, share) for share in _BOXES)
    return {
        "task": study.name, "model": LABELS.get(variant, variant), "quantity": quantity, "layer": layer,
        "mean": _mean(values), "lower_quartile": low, "median": middle, "upper_quartile": high,
    }  # fmt: skip


def _layer_panels(study: Study, rows: Sequence[dict[str, Any]]) -> list[Panel]:
    panels = []
    for quantity in ("activation factor, euclidean", "activation factor, cosine", "entropy"):
        mine = [row for row in rows if (row["task"], row["quantity"]) == (study.name, quantity)]
        series = [
            Series(
                model,
                [row["layer"] for row in mine if row["model"] == model],
                [row["median"] for row in mine if row["model"] == model],
            )
            for model in dict.fromkeys(row["model"] for row in mine)
        ]
        panels.append(Panel(study.name, "layer", f"median {quantity}", series))
    return panels


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
    study = text_study(request, "imdb")
    task, runs = train_study(request, study, variants=("transject", "post_ln"))
    batches = probe_batches(task, probe_count(request))
    rows: list[dict[str, Any]] = []
    means: dict[str, list[float]] = {}
    for run in runs:
        parts = part_entropies(trained_model(run), batches)
        kind = "expert" if run.variant == "transject" else "head"
        rows += [
            {
                "model": LABELS[run.variant], "seed": run.seed, "layer": layer + 1, "part": f"{kind} {index + 1}",
                "entropy": value,
            }
            for layer, values in enumerate(parts)
            for index, value in enumerate(values)
        ]  # fmt: skip
        means.setdefault(run.variant, []).append(_mean([value for values in parts for value in values]))
    drawn = [row for row in rows if row["seed"] == 0]
    panels = [
        Panel(
            model,
            "layer",
            "entropy (nats)",
            [
                Series(
                    part,
                    [row["layer"] for row in drawn if (row["model"], row["part"]) == (model, part)],
                    [row["entropy"] for row in drawn if (row["model"], row["part"]) == (model, part)],
                )
                for part in dict.fromkeys(row["part"] for row in drawn if row["model"] == model)
            ],
        )
        for model in dict.fromkeys(row["model"] for row in drawn)
    ]
    experts, heads = (mean_and_error(means[variant]) for variant in ("transject", "post_ln"))
    return Reproduction(
        rows,
        panels,
        got=f"mean entropy of experts {_plus_minus(*experts)}, of heads {_plus_minus(*heads)} nats (over seeds)",
        holds=None if request.scale == "toy" else experts[0] < heads[0],
        notes=(_KNN, "heads are narrower than experts, so their entropy rests on fewer values; drawn: seed 0"),
    )


def _plus_minus(mean: float, error: float) -> str:
    return f"{mean:.2f} +- {error:.2f}"


def figure_5(request: Request) -> Reproduction:
    """Residual weights alpha_l / L of trained TransJect models."""
    rows: list[dict[str, Any]] = []
    for study in _studies(request):
        _, runs = train_study(request, study, variants=("transject",))
        for run in runs:
            layers = residual_weights(trained_model(run))
            rows += [
                {
                    "task": study.name, "seed": run.seed, "layer": index + 1, "alpha": alpha,
                    "alpha_over_layers": alpha / len(layers),
                }
                for index, alpha in enumerate(layers)
            ]  # fmt: skip
    largest = max(abs(row["alpha_over_layers"]) for row in rows)
    panels = [
        Panel(
            task,
            "layer",
            "alpha / L",
            [
                Series(
                    f"seed {seed}",
                    [row["layer"] for row in rows if (row["task"], row["seed"]) == (task, seed)],
                    [row["alpha_over_layers"] for row in rows if (row["task"], row["seed"]) == (task, seed)],
                )
                for seed in dict.fromkeys(row["seed"] for row in rows if row["task"] == task)
            ],
        )
        for task in dict.fromkeys(row["task"] for row in rows)
    ]
    return Reproduction(
        rows,
        panels,
        got=f"largest |alpha| / L {largest:.3f} over {len(rows)} layers",
        holds=None if request.scale == "toy" else largest < 0.33,
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
    grid: list[tuple[str, str, float]] = [
        *itertools.product(["transject"], ["experts"], experts),
        *itertools.product(["transject", "post_ln"], ["layers"], layers),
        *itertools.product(["post_ln"], ["dropout"], dropouts),
    ]
    rows = [_configured(request, study, *configuration) for configuration in grid]
    kinds = [("transject", "experts"), ("transject", "layers"), ("post_ln", "layers"), ("post_ln", "dropout")]
    change = {kind: _change(rows, *kind) for kind in kinds}
    holds = (
        change["transject", "experts"][0] > 0
        and change["post_ln", "layers"][0] > abs(change["transject", "layers"][0])
        and change["post_ln", "dropout"][0] < 0
    )
    panels = [
        Panel(
            f"{LABELS[variant]}: {option}",
            option,
            "median activation factor, last layer",
            [Series("factor", *_columns(rows, variant, option))],
            legend=False,
        )
        for variant, option in kinds
    ]
    finite = all(math.isfinite(value) for value, _ in change.values())
    return Reproduction(
        rows,
        panels,
        got="change of the activation factor from the smallest to the largest value: "
        + ", ".join(
            f"{LABELS[variant]}, {option} {value:+.2f} +- {error:.2f}"
            for (variant, option), (value, error) in change.items()
        ),
        holds=None if request.scale == "toy" or not finite else holds,
        notes=(_KNN, f"{study.sizes.seeds} seeds for each configuration; dropout also on the embeddings"),
    )


def _configured(request: Request, study: Study, variant: str, option: str, value: float) -> dict[str, Any]:
    """Train one configuration of figure 6 with every seed and return its row: means, and the error of the factor."""
    changed = replace(study, name=f"{study.name}-{option}{value:g}", sizes=replace(study.sizes, **{option: value}))
    task, runs = train_study(request, changed, variants=(variant,))
    batches = probe_batches(task, probe_count(request))
    trained = [run for run in runs if run.metrics]
    found = [measure_layers(trained_model(run), batches) for run in trained]
    row: dict[str, Any] = {"model": LABELS[variant], "option": option, "value": value, "trained": len(trained)}
    if not trained:
        return row
    factor, error = mean_and_error([layers.median_factor() for layers in found])
    return {
        **row, "activation_factor": factor, "standard_error": error,
        "entropy": _mean([layers.entropy() for layers in found]),
        "entropy_standardized": _mean([layers.entropy(standardized=True) for layers in found]),
        "accuracy": 100 * _mean([run.metric("accuracy,test") for run in trained]),
    }  # fmt: skip


def _of(rows: Sequence[dict[str, Any]], variant: str, option: str) -> list[dict[str, Any]]:
    """Return the rows of one panel whose training did not diverge."""
    return [row for row in rows if (row["model"], row["option"]) == (LABELS[variant], option) and row["trained"]]


def _columns(rows: Sequence[dict[str, Any]], variant: str, option: str) -> tuple[list[float], list[float]]:
    mine = _of(rows, variant, option)
    return [row["value"] for row in mine], [row["activation_factor"] for row in mine]


def _change(rows: Sequence[dict[str, Any]], variant: str, option: str) -> tuple[float, float]:
    """Return the factor at the largest value minus that at the smallest, and its standard error."""
    mine = _of(rows, variant, option)
    if len(mine) < 2:
        return math.nan, math.nan
    first, last = mine[0], mine[-1]
    error = math.hypot(first["standard_error"], last["standard_error"])
    return last["activation_factor"] - first["activation_factor"], error


def figure_7(request: Request) -> Reproduction:
    """Histogram of expert weights over test texts, by layer."""
    rows: list[dict[str, Any]] = []
    panels: list[Panel] = []
    spread: list[float] = []
    experts = 0
    for study in _studies(request):
        task, runs = train_study(request, study, variants=("transject",))
        batches = probe_batches(task, probe_count(request))
        pooled: dict[int, list[float]] = {}
        for run in runs:
            for layer, weights in enumerate(gate_weights(trained_model(run), batches), 1):
                experts = len(weights[0])
                pooled.setdefault(layer, []).extend(value for row in weights for value in row)
                load = [_mean([row[index] for row in weights]) for index in range(experts)]
                spread += load
                rows += [
                    {
                        "task": study.name, "seed": run.seed, "layer": layer, "expert": index + 1,
                        "mean_weight": load[index],
                        "lower_quartile": quantile([row[index] for row in weights], 0.25),
                        "upper_quartile": quantile([row[index] for row in weights], 0.75),
                    }
                    for index in range(experts)
                ]  # fmt: skip
        series = [Series(f"layer {layer}", *_histogram(values), style="bars") for layer, values in pooled.items()]
        panels.append(Panel(study.name, "expert weight", "share of weights", series))
    even = 1 / experts
    return Reproduction(
        rows,
        panels,
        got=f"mean weight of an expert between {min(spread):.3f} and {max(spread):.3f}, {even:.2f} being even",
        holds=None if request.scale == "toy" else max(spread) < 2 * even and min(spread) > even / 2,
        notes=("the claim is taken as: every expert's mean weight is within a factor 2 of even",),
    )


def _histogram(values: Sequence[float], bins: int = 20) -> tuple[list[float], list[float]]:
    """Return bin centres in [0, 1] and the share of values in each."""
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int(value * bins))] += 1
    return [(index + 0.5) / bins for index in range(bins)], [count / len(values) for count in counts]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
