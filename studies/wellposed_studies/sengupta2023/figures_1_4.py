"""Sengupta et al. (2023), figures 1 and 4: the tokens of one sentence in trained models, layer by
layer."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from wellposed.charts import Panel, Row, Series, lines, where
from wellposed.errors import DataError
from wellposed.measurement import hidden_states, isomap, token_distances
from wellposed.recipes.recipe import Criterion, Reproduction, Request
from wellposed_studies.runs import mean_and_error, plus_minus
from wellposed_studies.sengupta2023.studies import text_study
from wellposed_studies.sengupta2023.trained import (
    LABELS,
    SCALE_NOTE,
    model_name,
    train_study,
    trained_model,
)
from wellposed_studies.verdicts import UNCERTAINTY, every, within

SENTENCE = "This movie is terrible but it has some good effects."
PAIRS = (("movie", "effects."), ("terrible", "good"), ("This", "it"))
"""Three pairs of related words; the paper does not say which it took."""
CHOSEN = ("movie", "terrible", "good", "effects.")
_GREY = 6
_METRICS: tuple[Literal["euclidean", "cosine"], ...] = ("euclidean", "cosine")


def figure_1(request: Request) -> Reproduction:
    """Euclidean and cosine distance of three pairs of tokens by layer, Transformer beside
    TransJect."""
    rows: list[dict[str, Any]] = []
    growth: dict[tuple[str, str], list[float]] = {}
    for variant, seed, states, words in [
        *_sentence_states(request),
        *_sentence_states(request, scaled=True),
    ]:
        for metric in _METRICS:
            layers = token_distances(states, metric=metric)
            ratios = []
            for pair in PAIRS:
                i, j = (_position(words, word) for word in pair)
                values = [float(distances[0, i, j]) for distances in layers]
                ratios.append(values[-1] / values[0])
                line = {"model": variant, "seed": seed, "pair": " - ".join(pair), "metric": metric}
                rows += [
                    {**line, "layer": layer, "distance": value}
                    for layer, value in enumerate(values)
                ]
            growth.setdefault((variant, metric), []).append(statistics.median(ratios))
    drawn = where(rows, seed=0)
    panels = [
        Panel(
            model,
            "layer",
            f"{metric} distance",
            lines(where(drawn, model=model, metric=metric), "layer", "distance", by="pair"),
        )
        for metric, model in dict.fromkeys(
            (row["metric"], row["model"]) for row in _by_metric(drawn)
        )
    ]
    return Reproduction(
        rows,
        panels,
        got="last layer over embedding, median of three pairs, mean and standard error over seeds: "
        + ", ".join(
            f"{variant} {metric} {plus_minus(mean_and_error(values))}"
            for (variant, metric), values in growth.items()
        ),
        holds=judge_figure_1(*(growth[LABELS["post_ln"], metric] for metric in _METRICS)),
        notes=(
            (
                f"the pairs {', '.join(' - '.join(pair) for pair in PAIRS)} (the paper does not"
                " name its own); the last state of the Transformer is normed; words outside the"
                " vocabulary are one unknown token; drawn: seed 0"
            ),
            SCALE_NOTE,
        ),
        criterion=Criterion(
            "in the Transformer without scaled embeddings the Euclidean distance grows by more than"
            " 1.2 from embedding to last layer and the cosine distance changes by less than a"
            " factor 2",
            len({row["seed"] for row in rows}),
            UNCERTAINTY,
        ),
    )


def _by_metric(rows: Sequence[Row]) -> list[Row]:
    return [row for metric in _METRICS for row in where(rows, metric=metric)]


def judge_figure_1(euclidean: Sequence[float], cosine: Sequence[float]) -> bool | None:
    """Say whether the Euclidean distance of every seed's Transformer grows while the cosine
    distance is kept."""
    return every((within(euclidean, low=1.2), within(cosine, 0.5, 2)))


def figure_4(request: Request) -> Reproduction:
    """Isomap of the sentence's tokens at each layer."""
    rows: list[dict[str, Any]] = []
    panels: list[Panel] = []
    kept: dict[str, list[float]] = {}
    for variant, seed, states, words in _sentence_states(request):
        kept.setdefault(variant, []).append(_correlation(states))
        points = isomap(
            states, words, chosen=[word for word in CHOSEN if word in words], neighbors=5
        ).rows
        rows += [{"model": variant, "seed": seed, **row} for row in points]
        if seed == 0:
            layers = range(len(states))
            panels += [
                _isomap_panel(f"{variant}, layer {layer}", where(points, layer=layer))
                for layer in layers
            ]
    return Reproduction(
        rows,
        panels,
        got=(
            "correlation of all token distances, last layer with embedding, mean and standard error"
            " over seeds: "
        )
        + ", ".join(
            f"{variant} {plus_minus(mean_and_error(values), 3)}" for variant, values in kept.items()
        ),
        holds=judge_figure_4(*(kept[LABELS[name]] for name in ("transject", "post_ln"))),
        notes=(
            "Isomap with 5 neighbours, each layer turned onto the one before; drawn: seed 0;"
            " marked: " + ", ".join(CHOSEN),
            "embeddings are not scaled, as in the paper",
            (
                "where distances are nearly equal a small change gives a token other neighbours and"
                " Isomap another picture; the verdict is on the distances themselves"
            ),
        ),
        criterion=Criterion(
            "the distances of tokens at the last layer correlate more with those of the embeddings"
            " in TransJect than in the Transformer",
            len(kept[LABELS["transject"]]),
            UNCERTAINTY,
        ),
    )


def judge_figure_4(transject: Sequence[float], transformer: Sequence[float]) -> bool | None:
    """Say whether TransJect keeps the distances better, seed by seed."""
    return within([ours - plain for ours, plain in zip(transject, transformer, strict=True)], low=0)


def _sentence_states(
    request: Request, *, scaled: bool = False
) -> list[tuple[str, int, tuple[Tensor, ...], list[str]]]:
    """Return the model, the seed, the hidden states of the sentence and its words; TransJect has no
    scale."""
    study = replace(text_study(request, "imdb"), scale_embeddings=scaled)
    task, runs = train_study(
        request, study, variants=("post_ln",) if scaled else ("transject", "post_ln")
    )
    broken = [f"{run.variant}, seed {run.seed}" for run in runs if not run.metrics]
    if broken:
        raise DataError(f"training diverged, so there is nothing to look at: {'; '.join(broken)}")
    encoded = task.tokenizer([SENTENCE], return_tensors="pt")
    batch = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    words: list[str] = list(SENTENCE.split())
    if batch["input_ids"].shape[1] != len(words):
        words = list(task.tokenizer.convert_ids_to_tokens(batch["input_ids"][0]))
    return [
        (
            model_name(run.variant, scaled=scaled),
            run.seed,
            hidden_states(trained_model(run).base_model, batch),
            words,
        )
        for run in runs
    ]


def _position(words: Sequence[str], word: str) -> int:
    """Return where a word stands, with or without its mark, in any case."""
    wanted = word.strip(".").lower()
    for index, candidate in enumerate(words):
        if candidate.strip(".").lower() == wanted:
            return index
    raise DataError(
        f"the tokenizer cuts {SENTENCE!r} into {list(words)}, without {word!r}; give a word"
        " tokenizer"
    )


def _correlation(states: Sequence[Tensor]) -> float:
    """Return Pearson's r of the distances of all pairs at the first and the last state."""
    distances = token_distances(states)
    row, column = torch.triu_indices(*distances[0].shape[1:], offset=1)
    pair = torch.stack([layer[0, row, column] for layer in (distances[0], distances[-1])])
    return float(torch.corrcoef(pair)[0, 1])


def _isomap_panel(title: str, rows: Sequence[Row]) -> Panel:
    others = where(rows, chosen=False)
    series = [
        Series("others", [row["x"] for row in others], [row["y"] for row in others], "dots", _GREY)
    ]
    series += [
        Series(row["token"], [row["x"]], [row["y"]], "dots", colour)
        for colour, row in enumerate(where(rows, chosen=True))
    ]
    return Panel(title, "first coordinate", "second coordinate", series)
