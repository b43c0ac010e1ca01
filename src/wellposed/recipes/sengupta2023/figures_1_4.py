"""Sengupta et al. (2023), figures 1 and 4: the tokens of one sentence in trained models, layer by layer."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wellposed.charts import Panel, Series
from wellposed.errors import DataError
from wellposed.measurement import hidden_states, isomap, token_distances
from wellposed.recipes.recipe import Reproduction, Request
from wellposed.recipes.sengupta2023.states import trained_model
from wellposed.recipes.sengupta2023.studies import text_study
from wellposed.recipes.sengupta2023.trained import LABELS, mean_and_error, train_study

SENTENCE = "This movie is terrible but it has some good effects."
PAIRS = (("movie", "effects."), ("terrible", "good"), ("This", "it"))
"""Three pairs of related words; the paper does not say which it took."""
CHOSEN = ("movie", "terrible", "good", "effects.")


def figure_1(request: Request) -> Reproduction:
    """Euclidean and cosine distance of three pairs of tokens by layer, Transformer beside TransJect."""
    models, tokenizer = _models(request)
    rows: list[dict[str, Any]] = []
    growth: dict[tuple[str, str], list[float]] = {}
    for (variant, seed), model in models.items():
        states, words = _sentence_states(model, tokenizer)
        for metric in ("euclidean", "cosine"):
            layers = token_distances(states, metric=metric)
            ratios = []
            for pair in PAIRS:
                i, j = (_position(words, word) for word in pair)
                values = [float(distances[0, i, j]) for distances in layers]
                ratios.append(values[-1] / values[0])
                rows += [
                    {
                        "model": LABELS[variant], "seed": seed, "pair": " - ".join(pair), "metric": metric,
                        "layer": layer, "distance": value,
                    }
                    for layer, value in enumerate(values)
                ]  # fmt: skip
            growth.setdefault((variant, metric), []).append(statistics.median(ratios))
    found = {key: mean_and_error(values) for key, values in growth.items()}
    said = found["post_ln", "euclidean"][0] > 1.2 and 0.5 < found["post_ln", "cosine"][0] < 2
    return Reproduction(
        rows,
        _distance_panels([row for row in rows if row["seed"] == 0]),
        got="last layer over embedding, median of three pairs, mean and standard error over seeds: "
        + ", ".join(
            f"{LABELS[variant]} {metric} {mean:.2f} +- {error:.2f}"
            for (variant, metric), (mean, error) in found.items()
        ),
        holds=None if request.scale == "toy" else said,
        notes=(
            f"the pairs {', '.join(' - '.join(pair) for pair in PAIRS)} (the paper does not name its own); the last "
            "state of the Transformer is normed; words outside the vocabulary are one unknown token; drawn: seed 0",
            "the claim is taken as: Euclidean distance grows by more than 1.2, cosine distance stays within a factor 2",
        ),
    )


def figure_4(request: Request) -> Reproduction:
    """Isomap of the sentence's tokens at each layer."""
    models, tokenizer = _models(request)
    rows: list[dict[str, Any]] = []
    panels: list[Panel] = []
    kept: dict[str, list[float]] = {}
    for (variant, seed), model in models.items():
        states, words = _sentence_states(model, tokenizer)
        kept.setdefault(variant, []).append(_correlation(states))
        points = isomap(states, words, chosen=[word for word in CHOSEN if word in words], neighbors=5)
        rows += [{"model": LABELS[variant], "seed": seed, **row} for row in points.rows]
        if seed == 0:
            for layer in range(len(states)):
                here = [row for row in points.rows if row["layer"] == layer]
                panels.append(_isomap_panel(f"{LABELS[variant]}, layer {layer}", here))
    means = {variant: mean_and_error(values) for variant, values in kept.items()}
    return Reproduction(
        rows,
        panels,
        got="correlation of all token distances, last layer with embedding, mean and standard error over seeds: "
        + ", ".join(f"{LABELS[variant]} {mean:.3f} +- {error:.3f}" for variant, (mean, error) in means.items()),
        holds=None if request.scale == "toy" else means["transject"][0] > means["post_ln"][0],
        notes=(
            "Isomap with 5 neighbours, each layer turned onto the one before; drawn: seed 0; marked: "
            + ", ".join(CHOSEN),
        ),
    )


def _models(request: Request) -> tuple[dict[tuple[str, int], Any], Any]:
    """Return the trained models by variant and seed, TransJect first, and the tokenizer."""
    study = text_study(request, "imdb")
    task, runs = train_study(request, study, variants=("transject", "post_ln"))
    broken = [f"{run.variant}, seed {run.seed}" for run in runs if not run.metrics]
    if broken:
        raise DataError(f"training diverged, so there is nothing to look at: {'; '.join(broken)}")
    return {(run.variant, run.seed): trained_model(run) for run in runs}, task.tokenizer


def _sentence_states(model: Any, tokenizer: Any) -> tuple[tuple[Tensor, ...], list[str]]:
    """Return the hidden states of the sentence and its words, as the tokenizer cuts it."""
    encoded = tokenizer([SENTENCE], return_tensors="pt")
    words = SENTENCE.split()
    if encoded["input_ids"].shape[1] != len(words):
        words = tokenizer.convert_ids_to_tokens(encoded["input_ids"][0])
    batch = {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}
    return hidden_states(model.base_model, batch), list(words)


def _position(words: Sequence[str], word: str) -> int:
    """Return where a word stands, with or without its mark, in any case."""
    wanted = word.strip(".").lower()
    for index, candidate in enumerate(words):
        if candidate.strip(".").lower() == wanted:
            return index
    raise DataError(f"the tokenizer cuts {SENTENCE!r} into {list(words)}, without {word!r}; give a word tokenizer")


def _correlation(states: Sequence[Tensor]) -> float:
    """Return Pearson's r of the distances of all pairs at the first and the last state."""
    distances = token_distances(states)
    row, column = torch.triu_indices(*distances[0].shape[1:], offset=1)
    pair = torch.stack([layer[0, row, column] for layer in (distances[0], distances[-1])])
    return float(torch.corrcoef(pair)[0, 1])


def _distance_panels(rows: Sequence[dict[str, Any]]) -> list[Panel]:
    panels = []
    for model, metric in dict.fromkeys((row["model"], row["metric"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["metric"]) == (model, metric)]
        series = []
        for pair in dict.fromkeys(row["pair"] for row in mine):
            values = [row["distance"] for row in mine if row["pair"] == pair]
            series.append(Series(pair, list(range(len(values))), values))
        panels.append(Panel(model, "layer", f"{metric} distance", series))
    return panels


def _isomap_panel(title: str, rows: Sequence[dict[str, Any]]) -> Panel:
    others = [row for row in rows if not row["chosen"]]
    series = [Series("others", [row["x"] for row in others], [row["y"] for row in others], style="dots", colour=6)]
    series += [
        Series(row["token"], [row["x"]], [row["y"]], style="dots", colour=index)
        for index, row in enumerate(row for row in rows if row["chosen"])
    ]
    return Panel(title, "", "", series)
