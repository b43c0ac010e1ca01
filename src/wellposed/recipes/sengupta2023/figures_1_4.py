"""Sengupta et al. (2023), figures 1 and 4: the tokens of one sentence in trained models, layer by layer."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wellposed.charts import Panel, Row, Series, lines, where
from wellposed.errors import DataError
from wellposed.measurement import hidden_states, isomap, token_distances
from wellposed.recipes.recipe import Reproduction, Request
from wellposed.recipes.runs import mean_and_error, plus_minus
from wellposed.recipes.sengupta2023.studies import text_study
from wellposed.recipes.sengupta2023.trained import LABELS, train_study, trained_model

SENTENCE = "This movie is terrible but it has some good effects."
PAIRS = (("movie", "effects."), ("terrible", "good"), ("This", "it"))
"""Three pairs of related words; the paper does not say which it took."""
CHOSEN = ("movie", "terrible", "good", "effects.")
_GREY = 6


def figure_1(request: Request) -> Reproduction:
    """Euclidean and cosine distance of three pairs of tokens by layer, Transformer beside TransJect."""
    rows: list[dict[str, Any]] = []
    growth: dict[tuple[str, str], list[float]] = {}
    for variant, seed, states, words in _sentence_states(request):
        for metric in ("euclidean", "cosine"):
            layers = token_distances(states, metric=metric)
            ratios = []
            for pair in PAIRS:
                i, j = (_position(words, word) for word in pair)
                values = [float(distances[0, i, j]) for distances in layers]
                ratios.append(values[-1] / values[0])
                line = {"model": LABELS[variant], "seed": seed, "pair": " - ".join(pair), "metric": metric}
                rows += [{**line, "layer": layer, "distance": value} for layer, value in enumerate(values)]
            growth.setdefault((variant, metric), []).append(statistics.median(ratios))
    found = {key: mean_and_error(values) for key, values in growth.items()}
    drawn = where(rows, seed=0)
    panels = [
        Panel(
            model,
            "layer",
            f"{metric} distance",
            lines(where(drawn, model=model, metric=metric), "layer", "distance", by="pair"),
        )
        for model, metric in dict.fromkeys((row["model"], row["metric"]) for row in drawn)
    ]
    return Reproduction(
        rows,
        panels,
        got="last layer over embedding, median of three pairs, mean and standard error over seeds: "
        + ", ".join(f"{LABELS[variant]} {metric} {plus_minus(value)}" for (variant, metric), value in found.items()),
        holds=found["post_ln", "euclidean"][0] > 1.2 and 0.5 < found["post_ln", "cosine"][0] < 2,
        notes=(
            f"the pairs {', '.join(' - '.join(pair) for pair in PAIRS)} (the paper does not name its own); the last "
            "state of the Transformer is normed; words outside the vocabulary are one unknown token; drawn: seed 0",
            "the claim is taken as: Euclidean distance grows by more than 1.2, cosine distance stays within a factor 2",
        ),
    )


def figure_4(request: Request) -> Reproduction:
    """Isomap of the sentence's tokens at each layer."""
    rows: list[dict[str, Any]] = []
    panels: list[Panel] = []
    kept: dict[str, list[float]] = {}
    for variant, seed, states, words in _sentence_states(request):
        kept.setdefault(variant, []).append(_correlation(states))
        points = isomap(states, words, chosen=[word for word in CHOSEN if word in words], neighbors=5).rows
        rows += [{"model": LABELS[variant], "seed": seed, **row} for row in points]
        if seed == 0:
            layers = range(len(states))
            panels += [
                _isomap_panel(f"{LABELS[variant]}, layer {layer}", where(points, layer=layer)) for layer in layers
            ]
    means = {variant: mean_and_error(values) for variant, values in kept.items()}
    return Reproduction(
        rows,
        panels,
        got="correlation of all token distances, last layer with embedding, mean and standard error over seeds: "
        + ", ".join(f"{LABELS[variant]} {plus_minus(value, 3)}" for variant, value in means.items()),
        holds=means["transject"][0] > means["post_ln"][0],
        notes=(
            "Isomap with 5 neighbours, each layer turned onto the one before; drawn: seed 0; marked: "
            + ", ".join(CHOSEN),
        ),
    )


def _sentence_states(request: Request) -> list[tuple[str, int, tuple[Tensor, ...], list[str]]]:
    """Return, for TransJect and the Transformer and each seed, the hidden states of the sentence and its words."""
    task, runs = train_study(request, text_study(request, "imdb"), variants=("transject", "post_ln"))
    broken = [f"{run.variant}, seed {run.seed}" for run in runs if not run.metrics]
    if broken:
        raise DataError(f"training diverged, so there is nothing to look at: {'; '.join(broken)}")
    encoded = task.tokenizer([SENTENCE], return_tensors="pt")
    batch = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    words: list[str] = list(SENTENCE.split())
    if batch["input_ids"].shape[1] != len(words):
        words = list(task.tokenizer.convert_ids_to_tokens(batch["input_ids"][0]))
    return [(run.variant, run.seed, hidden_states(trained_model(run).base_model, batch), words) for run in runs]


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


def _isomap_panel(title: str, rows: Sequence[Row]) -> Panel:
    others = where(rows, chosen=False)
    series = [Series("others", [row["x"] for row in others], [row["y"] for row in others], "dots", _GREY)]
    series += [
        Series(row["token"], [row["x"]], [row["y"]], "dots", colour)
        for colour, row in enumerate(where(rows, chosen=True))
    ]
    return Panel(title, "", "", series)
