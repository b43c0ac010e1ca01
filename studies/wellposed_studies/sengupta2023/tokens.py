"""Sengupta et al. (2023): the tokens of one sentence in trained models, layer by layer."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wellposed.errors import DataError
from wellposed_lab.charts import Panel, Row, Series, lines, where
from wellposed_studies.recipe import Reproduction, Request, Verdict, recipe
from wellposed_studies.sengupta2023.distances import Metric, hidden_states, token_distances
from wellposed_studies.sengupta2023.isomap import isomap
from wellposed_studies.sengupta2023.trained import (
    LABELS,
    SCALE_NOTE,
    SCALED,
    SEEDS_NOTE,
    text_study,
    train_study,
)
from wellposed_studies.study import FinishedRun, judged, mean_se, minus
from wellposed_studies.verdicts import Power, agreed, by_training, every, within

SENTENCE = "This movie is terrible but it has some good effects."
PAIRS = (("movie", "effects."), ("terrible", "good"), ("This", "it"))
"""Three pairs of related words; the paper does not name its own."""
CHOSEN = ("movie", "terrible", "good", "effects.")
_MOVED = 0.1
"""Least relative change of the embeddings by layers that count as doing something."""
_GREY = 6
_METRICS: tuple[Metric, ...] = ("euclidean", "cosine")


def imdb_seeds(request: Request) -> int:
    return text_study(request, "imdb").sizes.seeds


@recipe(
    "sengupta2023/figure-1",
    takes=("data",),
    power=Power(
        imdb_seeds, "distances, last layer over embedding", 0.05, "scaled Transformer on IMDb"
    ),
)
def figure_1(request: Request) -> Reproduction:
    """Distances of three pairs of tokens by layer in a trained Transformer (data: imdb).

    Claim: the Euclidean distance between tokens increases in the upper layers, the cosine distance
        is preserved.
    Quote: "the Euclidean distance between their representations increases in the upper layers"
        (section 1).
    Test: in the Transformer the Euclidean distance grows by more than 1.2 from embedding to last
        layer. The cosine distance changes by less than a factor 2. Both hold beyond untrained
        models. Undecided if the scales of embeddings, of which the paper prints none, disagree.
    """
    rows: list[Row] = []
    growth: dict[tuple[str, str], list[float]] = {}
    probes = _states(request)
    for (model, seed), states, words in probes.records:
        for metric in _METRICS:
            layers = token_distances(states, metric)
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

    texts = [f"{model} {metric} {mean_se(values)}" for (model, metric), values in growth.items()]
    got = (
        "last layer over embedding, median of three pairs, mean and standard error over seeds:"
        f" {', '.join(texts)}"
    )
    holds = probes.verdict(
        judge_figure_1,
        lambda euclidean, _: euclidean,
        lambda _, transformer: [growth[transformer, metric] for metric in _METRICS],
    )
    runs = [run for run in probes.runs if run.variant == "post_ln"]  # the judged models
    notes = (
        (
            f"the pairs {', '.join(' - '.join(pair) for pair in PAIRS)} (the paper does not"
            " name its own). The last state of the Transformer is normalised. Words outside the"
            " vocabulary are one unknown token. Drawn: seed 0"
        ),
        SCALE_NOTE,
        SEEDS_NOTE,
    )

    return judged(request, rows, panels, got, holds, runs, notes=notes)


def judge_figure_1(euclidean: Sequence[float], cosine: Sequence[float]) -> Verdict:
    return every((within(euclidean, low=1.2), within(cosine, 0.5, 2)))


@recipe(
    "sengupta2023/figure-4",
    takes=("data",),
    power=Power(
        imdb_seeds, "correlations of distances", 0.07, "TransJect less Transformer on IMDb"
    ),
)
def figure_4(request: Request) -> Reproduction:
    """Isomap of the tokens of a sentence by layer, in TransJect and Transformer (data: imdb).

    Claim: TransJect keeps the relative distances between tokens through the layers, and Transformer
        spreads them.
    Quote: "TransJect maintains the initial embedding" (section 5).
    Test: the distances of tokens at the last layer correlate more with those of the embeddings in
        TransJect than in the Transformer, and than in the one with ReZero, beyond untrained models.
        Undecided if the scales of embeddings disagree.
        Undecided unless the layers of TransJect change the embeddings by a tenth or more in
        every seed: layers that do nothing keep every distance.
    Note: if distances are nearly equal, a small change gives a token other neighbours and Isomap
        another picture. The verdict is on the distances themselves.
    """
    rows: list[Row] = []
    panels: list[Panel] = []
    pearson: dict[str, list[float]] = {}
    moved: dict[str, list[float]] = {}
    probes = _states(request, "rezero")
    for (model, seed), states, words in probes.records:
        # Pearson's r of the distances of all pairs at the first and the last state.
        distances = token_distances(states)
        row, column = torch.triu_indices(*distances[0].shape[1:], offset=1)
        pair = torch.stack([layer[0, row, column] for layer in (distances[0], distances[-1])])
        pearson.setdefault(model, []).append(float(torch.corrcoef(pair)[0, 1]))
        change = (states[-1] - states[0]).norm() / states[0].norm()
        moved.setdefault(model, []).append(float(change))
        chosen = [word for word in CHOSEN if word in words]
        points = isomap(states, words, chosen=chosen)
        rows += [{"model": model, "seed": seed, **row} for row in points]
        if seed == 0:
            for layer in range(len(states)):
                panels.append(_isomap_panel(f"{model}, layer {layer}", where(points, layer=layer)))

    texts = [
        f"{model} {mean_se(values, 3)}, states changed by {mean_se(moved[model])}"
        for model, values in pearson.items()
    ]
    got = (
        "correlation of all token distances, last layer with embedding, mean and standard error"
        f" over seeds, and the change of the states over their size: {'; '.join(texts)}"
    )
    holds = probes.verdict(
        judge_figure_4,
        lambda transject, transformer, *_: minus(transject, transformer),
        lambda *names: [*(pearson[name] for name in names), moved[names[0]]],
    )
    runs = probes.runs
    notes = (
        "Isomap with 5 neighbours, each layer turned onto the one before; drawn: seed 0;"
        f" marked: {', '.join(CHOSEN)}",
        SCALE_NOTE,
        SEEDS_NOTE,
    )

    return judged(request, rows, panels, got, holds, runs, notes=notes)


def judge_figure_4(
    transject: Sequence[float],
    transformer: Sequence[float],
    rezero: Sequence[float],
    moved: Sequence[float],
) -> Verdict:
    """Return whether TransJect keeps the distances better, seed by seed; None if it moves little."""
    if min(moved) < _MOVED:
        return None
    return every(within(minus(transject, plain), low=0) for plain in (transformer, rezero))


_UNTRAINED = ", untrained"


@dataclass(frozen=True)
class States:
    """Hidden states of the sentence, after training and before, by both scales of embeddings."""

    runs: Sequence[FinishedRun]
    records: Sequence[tuple[tuple[str, int], Any, list[str]]]
    """(Model, seed), hidden states, words."""

    def verdict(
        self,
        judge: Callable[..., Verdict],
        effect: Callable[..., Sequence[float]],
        numbers: Callable[..., Sequence[Sequence[float]]],
    ) -> Verdict:
        """Return `by_training` of TransJect and the Transformers, if both scales of these agree."""
        models = dict.fromkeys(model for (model, _), *_ in self.records)
        trained = [model for model in models if not model.endswith(_UNTRAINED)]
        verdicts = []
        for ending in ("", SCALED):
            names = [
                model
                for model in trained
                if model == LABELS["transject"] or model.endswith(SCALED) is bool(ending)
            ]
            untrained = numbers(*(name + _UNTRAINED for name in names))
            verdicts.append(by_training(judge, effect, numbers(*names), untrained))
        return agreed(verdicts)


def _states(request: Request, *others: str) -> States:
    """Return the hidden states of the sentence in each model; TransJect has no scale."""
    runs = []
    records = []
    for study in text_study(request, "imdb").scales():
        variants = ("post_ln", *others)
        if not study.scale_embeddings:
            variants = ("transject", *variants)
        task, trained = train_study(request, study, variants=variants)
        broken = [f"{run.variant}, seed {run.seed}" for run in trained if not run.metrics]
        if broken:
            raise DataError(f"training diverged, so no states can be drawn: {'; '.join(broken)}")
        encoded = task.tokenizer([SENTENCE], return_tensors="pt")
        batch = {name: encoded[name] for name in ("input_ids", "attention_mask")}
        words: list[str] = [*SENTENCE.split()]
        if batch["input_ids"].shape[1] != len(words):
            words = list(task.tokenizer.convert_ids_to_tokens(batch["input_ids"][0]))
        runs += trained
        for run, (before, after) in itertools.product(
            trained, (("model", ""), ("untrained", _UNTRAINED))
        ):
            name = study.model_name(run.variant) + after
            states = hidden_states(getattr(run, before).base_model, batch)
            records.append(((name, run.seed), states, words))

    return States(runs, records)


def _position(words: Sequence[str], word: str) -> int:
    """Return the index of a word, in any case, with or without its punctuation."""
    plain = [candidate.strip(".").lower() for candidate in words]
    if word.strip(".").lower() not in plain:
        raise DataError(
            f"the tokenizer splits {SENTENCE!r} into {list(words)}, without {word!r}; use a word"
            " tokenizer"
        )
    return plain.index(word.strip(".").lower())


def _isomap_panel(title: str, rows: Sequence[Row]) -> Panel:
    others = where(rows, chosen=False)
    series = []
    x, y = ([row[name] for row in others] for name in ("x", "y"))
    series.append(Series("others", x, y, "dots", _GREY))
    for colour, row in enumerate(where(rows, chosen=True)):
        series.append(Series(row["token"], [row["x"]], [row["y"]], "dots", colour))
    return Panel(title, "first coordinate", "second coordinate", series)
