"""Sengupta et al. (2023), figure 3a: activation factors and entropies by layer, and the
correlations of section 5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from wellposed.charts import Panel, Row, where
from wellposed.measurement import correlate
from wellposed.recipes.recipe import Criterion, Reproduction, Request
from wellposed_studies.runs import plus_minus
from wellposed_studies.sengupta2023.measured import (
    NEIGHBOURS_NOTE,
    box_series,
    figure_studies,
    mean_or_infinite,
    measure_study,
    printed_line,
)
from wellposed_studies.sengupta2023.printed import ENTROPY, FACTOR
from wellposed_studies.sengupta2023.states import METRICS, Layers, quantile
from wellposed_studies.sengupta2023.trained import LABELS, SCALE_NOTE, Study
from wellposed_studies.verdicts import UNCERTAINTY, every, within

_MODELS = ("transject", "post_ln", "rezero", "orthogonal")
_MUCH_HIGHER = 1.5
_DRAWN = ("activation factor, euclidean", "activation factor, cosine", "entropy")


def figure_3a(request: Request) -> Reproduction:
    """Activation factor (three distances) and entropy by layer, and the correlations of section
    5."""
    rows: list[dict[str, Any]] = []
    panels: list[Panel] = []
    said: list[str] = []
    verdicts: list[bool | None] = []
    studies = figure_studies(request)
    for study in studies:
        found = measure_study(request, replace(study, scale_embeddings=False), _MODELS)
        found |= measure_study(request, study, _MODELS[1:])
        mine = [
            row
            for model, runs in found.items()
            for row in _layer_rows(study, model, [m for m, _ in runs])
        ]
        rows += mine
        panels += [
            _panel(study.name, quantity, where(mine, quantity=quantity), list(found))
            for quantity in _DRAWN
        ]
        points = [
            (layers.median_factor(), layers.entropy(), score)
            for runs in found.values()
            for layers, score in runs
        ]
        factors, entropies = (
            {model: [of(layers) for layers, _ in runs] for model, runs in found.items()}
            for of in (Layers.median_factor, Layers.entropy)
        )
        said.append(
            f"{study.name}: median activation factor {_by_model(factors)}; entropy"
            f" {_by_model(entropies)}" + _correlations(points)
        )
        verdicts.append(
            judge_figure_3a(*(factors[LABELS[name]] for name in ("transject", "post_ln")))
        )
    return Reproduction(
        rows,
        panels,
        got="; ".join(said),
        holds=every(verdicts),
        notes=(
            NEIGHBOURS_NOTE,
            SCALE_NOTE,
            (
                "the paper prints r(factor, accuracy) -0.81 (p 0.09) on IMDb and -0.68 on"
                " characters, and Spearman(factor, entropy) 1.0, over its four models"
            ),
            (
                "-inf: some value occurs more often than there are neighbours, as TransJect's code"
                " of a position does in the embeddings of many texts, so that they have no density"
            ),
        ),
        criterion=Criterion(
            "at the last layer, on both tasks and without scaled embeddings, the median activation"
            " factor of TransJect is within 0.9 to 1.1 and that of the Transformer at least"
            f" {_MUCH_HIGHER:g} times as high",
            studies[0].sizes.seeds,
            UNCERTAINTY,
        ),
    )


def _panel(task: str, quantity: str, rows: Sequence[Row], models: Sequence[str]) -> Panel:
    """Return boxes of every model by layer, with what the paper prints of it."""
    boxes = [box_series(model, where(rows, model=model)) for model in models]
    layers = [row["layer"] for row in rows]
    printed = {LABELS["transject"]: FACTOR} if quantity == _DRAWN[0] else {}
    if quantity == "entropy" and task == "imdb":
        printed = ENTROPY
    drawn = [
        printed_line(model, height, layers, models.index(model))
        for model, height in printed.items()
    ]
    return Panel(task, "layer", quantity, [*boxes, *drawn])


def judge_figure_3a(transject: Sequence[float], transformer: Sequence[float]) -> bool | None:
    """Say whether TransJect keeps distances, and the Transformer's factor is much higher."""
    ratios = [plain / ours for plain, ours in zip(transformer, transject, strict=False)]
    return every((within(transject, 0.9, 1.1), within(ratios, low=_MUCH_HIGHER)))


def _by_model(values: dict[str, list[float]]) -> str:
    return ", ".join(
        f"{model} {plus_minus(mean_or_infinite(of_seeds))}" for model, of_seeds in values.items()
    )


def _layer_rows(study: Study, model: str, seeds: Sequence[Layers]) -> list[dict[str, Any]]:
    """Return quartiles over the sequences of all seeds, for each layer of each quantity."""
    quantities = [
        (f"activation factor, {m}", 1, [layers.factors[m] for layers in seeds]) for m in METRICS
    ]
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
