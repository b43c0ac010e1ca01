"""Sengupta et al. (2023): the tokens of one sentence in trained models, layer by layer."""

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
from wellposed.recipes.recipe import Criterion, Reproduction, Request, recipe
from wellposed_studies.sengupta2023.trained import LABELS, SCALE_NOTE, text_study, train_study
from wellposed_studies.study import minus, said
from wellposed_studies.verdicts import UNCERTAINTY, Power, every, within

SENTENCE = "This movie is terrible but it has some good effects."
PAIRS = (("movie", "effects."), ("terrible", "good"), ("This", "it"))
"""Three pairs of related words; the paper does not say which it took."""
CHOSEN = ("movie", "terrible", "good", "effects.")
_GREY = 6
_METRICS: tuple[Literal["euclidean", "cosine"], ...] = ("euclidean", "cosine")


def imdb_seeds(request: Request) -> int:
    """Return the trainings of each model on IMDb."""
    return text_study(request, "imdb").sizes.seeds


@recipe(
    "sengupta2023/figure-1",
    measured={"mini": 11},
    estimated={"medium": 120, "paper": 600},
    takes=("data",),
    power=Power(
        imdb_seeds, "distances, last layer over embedding", 0.05, "scaled Transformer on IMDb"
    ),
)
def figure_1(request: Request) -> Reproduction:
    """Distances between three pairs of tokens, layer by layer, in a trained Transformer (data:
    imdb).

    Claim: the Euclidean distance between tokens increases in the upper layers, the cosine
    distance is preserved

    Test: in the Transformer without scaled embeddings the Euclidean distance grows by more than
    1.2 from embedding to last layer and the cosine distance changes by less than a factor 2
    """
    rows: list[Row] = []
    growth: dict[tuple[str, str], list[float]] = {}
    for model, seed, states, words in _states(request) + _states(request, scaled=True):
        for metric in _METRICS:
            layers = token_distances(states, metric=metric)
            ratios = []
            for pair in PAIRS:
                i, j = (_position(words, word) for word in pair)
                values = [float(distances[0, i, j]) for distances in layers]
                ratios.append(values[-1] / values[0])
                line = {"model": model, "seed": seed, "pair": " - ".join(pair), "metric": metric}
                rows += [{**line, "layer": at, "distance": v} for at, v in enumerate(values)]
            growth.setdefault((model, metric), []).append(statistics.median(ratios))
    panels = []
    for metric in _METRICS:
        for model in dict.fromkeys(row["model"] for row in rows):
            mine = where(rows, seed=0, model=model, metric=metric)
            series = lines(mine, "layer", "distance", by="pair")
            panels.append(Panel(model, "layer", f"{metric} distance", series))
    texts = [f"{model} {metric} {said(values)}" for (model, metric), values in growth.items()]
    return Reproduction(
        rows,
        panels,
        got=(
            "last layer over embedding, median of three pairs, mean and standard error over seeds:"
            f" {', '.join(texts)}"
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
        criterion=Criterion("", imdb_seeds(request), UNCERTAINTY),
    )


def judge_figure_1(euclidean: Sequence[float], cosine: Sequence[float]) -> bool | None:
    """Say whether the Euclidean distance of every seed's Transformer grows while the cosine
    distance is kept."""
    return every((within(euclidean, low=1.2), within(cosine, 0.5, 2)))


@recipe(
    "sengupta2023/figure-4",
    measured={"mini": 1.3},
    estimated={"medium": 90, "paper": 1200},
    takes=("data",),
    power=Power(
        imdb_seeds, "correlations of distances", 0.07, "TransJect less Transformer on IMDb"
    ),
)
def figure_4(request: Request) -> Reproduction:
    """Isomap of the tokens of a sentence, layer by layer, in TransJect and Transformer (data:
    imdb).

    Claim: TransJect keeps the relative distances between tokens through the layers; Transformer
    spreads them

    Test: the distances of tokens at the last layer correlate more with those of the embeddings
    in TransJect than in the Transformer

    Note: embeddings are not scaled, as in the paper

    Note: where distances are nearly equal a small change gives a token other neighbours and
    Isomap another picture; the verdict is on the distances themselves
    """
    rows: list[Row] = []
    panels: list[Panel] = []
    kept: dict[str, list[float]] = {}
    for model, seed, states, words in _states(request):
        kept.setdefault(model, []).append(_correlation(states))
        chosen = [word for word in CHOSEN if word in words]
        points = isomap(states, words, chosen=chosen, neighbors=5).rows
        rows += [{"model": model, "seed": seed, **row} for row in points]
        if seed == 0:
            for layer in range(len(states)):
                panels.append(_isomap_panel(f"{model}, layer {layer}", where(points, layer=layer)))
    texts = [f"{model} {said(values, 3)}" for model, values in kept.items()]
    return Reproduction(
        rows,
        panels,
        got=(
            "correlation of all token distances, last layer with embedding, mean and standard error"
            f" over seeds: {', '.join(texts)}"
        ),
        holds=judge_figure_4(*(kept[LABELS[name]] for name in ("transject", "post_ln"))),
        notes=(
            "Isomap with 5 neighbours, each layer turned onto the one before; drawn: seed 0;"
            f" marked: {', '.join(CHOSEN)}",
        ),
        criterion=Criterion("", imdb_seeds(request), UNCERTAINTY),
    )


def judge_figure_4(transject: Sequence[float], transformer: Sequence[float]) -> bool | None:
    """Say whether TransJect keeps the distances better, seed by seed."""
    return within(minus(transject, transformer), low=0)


def _states(request: Request, *, scaled: bool = False) -> list[tuple[str, int, Any, list[str]]]:
    """Return the model, the seed, the hidden states of the sentence and its words; TransJect has no
    scale."""
    study = replace(text_study(request, "imdb"), scale_embeddings=scaled)
    variants = ("post_ln",) if scaled else ("transject", "post_ln")
    task, runs = train_study(request, study, variants=variants)
    broken = [f"{run.variant}, seed {run.seed}" for run in runs if not run.metrics]
    if broken:
        raise DataError(f"training diverged, so there is nothing to look at: {'; '.join(broken)}")
    encoded = task.tokenizer([SENTENCE], return_tensors="pt")
    batch = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    words: list[str] = [*SENTENCE.split()]
    if batch["input_ids"].shape[1] != len(words):
        words = list(task.tokenizer.convert_ids_to_tokens(batch["input_ids"][0]))
    return [
        (study.model_name(run.variant), run.seed, hidden_states(run.model.base_model, batch), words)
        for run in runs
    ]


def _position(words: Sequence[str], word: str) -> int:
    """Return where a word stands, with or without its mark, in any case."""
    plain = [candidate.strip(".").lower() for candidate in words]
    if word.strip(".").lower() not in plain:
        raise DataError(
            f"the tokenizer cuts {SENTENCE!r} into {list(words)}, without {word!r}; give a word"
            " tokenizer"
        )
    return plain.index(word.strip(".").lower())


def _correlation(states: Sequence[Tensor]) -> float:
    """Return Pearson's r of the distances of all pairs at the first and the last state."""
    distances = token_distances(states)
    row, column = torch.triu_indices(*distances[0].shape[1:], offset=1)
    pair = torch.stack([layer[0, row, column] for layer in (distances[0], distances[-1])])
    return float(torch.corrcoef(pair)[0, 1])


def _isomap_panel(title: str, rows: Sequence[Row]) -> Panel:
    others, series = where(rows, chosen=False), []
    x, y = ([row[name] for row in others] for name in ("x", "y"))
    series.append(Series("others", x, y, "dots", _GREY))
    for colour, row in enumerate(where(rows, chosen=True)):
        series.append(Series(row["token"], [row["x"]], [row["y"]], "dots", colour))
    return Panel(title, "first coordinate", "second coordinate", series)
