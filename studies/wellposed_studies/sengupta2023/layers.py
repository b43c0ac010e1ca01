"""Sengupta et al. (2023): activation factors, entropies and weights, layer by layer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from wellposed.errors import ConfigError
from wellposed_lab.charts import Panel, Row, Series, lines, where
from wellposed_studies.recipe import Reproduction, Request, Verdict, recipe
from wellposed_studies.sengupta2023.states import (
    METRICS,
    Layers,
    gate_weights,
    measure_layers,
    part_entropies,
    probe_batches,
    quantile,
    residual_weights,
)
from wellposed_studies.sengupta2023.tokens import imdb_seeds
from wellposed_studies.sengupta2023.trained import (
    ENTROPY,
    FACTOR,
    GATE_MODE,
    LABELS,
    LARGEST_WEIGHT,
    NEIGHBOURS_NOTE,
    PART_ENTROPY,
    SCALE_NOTE,
    SEEDS_NOTE,
    Study,
    arena_study,
    text_study,
    train_study,
    tuned_study,
)
from wellposed_studies.study import (
    FinishedRun,
    judged,
    listing,
    mean_se,
    mean_series,
    minus,
    spanned,
)
from wellposed_studies.verdicts import AGREED, Power, agreed, by_training, every, within

_NOTES = (NEIGHBOURS_NOTE, SCALE_NOTE, SEEDS_NOTE)
MINI_NOTE = "at mini scale on IMDb alone: its characters take more steps than that scale has"
_DATA: dict[str, Any] = {"takes": ("data",)}
FACTORS = {
    **_DATA,
    "power": Power(imdb_seeds, "median activation factors", 0.12, "Transformer by dropout on IMDb"),
}
_WEIGHTS = {**_DATA, "estimated": {"medium": 210}, "power": Power(imdb_seeds)}
_MODELS = ("transject", "post_ln", "rezero", "orthogonal")
_ABOUT_1 = (0.9, 1.1)
_MUCH_HIGHER = 1.5
_TOO_LOW = _ABOUT_1[0] * _MUCH_HIGHER
_DRAWN = ("activation factor, euclidean", "activation factor, cosine", "entropy")
_PARTS = ("least", "lower_quartile", "median", "upper_quartile", "greatest")
_TAIL = 0.005


def figure_studies(request: Request) -> list[Study]:
    """Return IMDb and its characters; mini scale, too short for characters, has IMDb alone."""
    characters = [] if request.scale == "mini" else [arena_study(request, "text")]
    return [text_study(request, "imdb"), *characters]


def both_starts(request: Request) -> list[Study]:
    """Return the studies with residual weights that start at 0, and at 1/2 for twice the steps."""
    studies = figure_studies(request)
    longer = [study.resized("sigmoid", steps=2 * study.sizes.steps) for study in studies]
    return [*studies, *(replace(study, start="sigmoid") for study in longer)]


@recipe("sengupta2023/figure-3a", **FACTORS)
def figure_3a(request: Request) -> Reproduction:
    """Activation factors and entropies by layer of four models (the runs of tables 1 and 2).

    Claim: the median activation factor of TransJect is about 1, that of Transformer much higher;
        entropy -1.3 against 5.8.
    Quote: "the median empirical activation factor for TransJect is" (caption of Figure 3).
    Test: at the last layer, on each task, the median activation factor of TransJect is within
        {_ABOUT_1[0]:g} to {_ABOUT_1[1]:g}. That of the Transformer is at least {_MUCH_HIGHER:g}
        times as high. Both hold beyond untrained models, at both scales of the Transformer's
        embeddings. Undecided if the scales disagree, as the paper prints none. A Transformer below
        {_TOO_LOW:g} at both is against it whatever TransJect does, so no other model is judged then.
    Note: the paper prints r(factor, accuracy) -0.81 (p 0.09) on IMDb and -0.68 on characters, and
        Spearman(factor, entropy) 1.0, over its four models.
    Note: -inf means that some value occurs more often than there are neighbours, so that they have
        no density. TransJect's code of a position does so in the embeddings of many texts.
    Note: {MINI_NOTE}.
    """
    rows: list[Row] = []
    panels: list[Panel] = []
    texts: list[str] = []
    verdicts: list[Verdict] = []
    runs: list[FinishedRun] = []
    for study in figure_studies(request):
        measured = _measured(request, replace(study, scale_embeddings=False), _MODELS)
        measured |= _measured(request, study, _MODELS[1:])
        mine = [
            row
            for model, seeds in measured.items()
            for row in _layer_rows(study.name, model, [layers for _, layers, _ in seeds])
        ]
        rows += mine
        for quantity in _DRAWN:
            subset = where(mine, quantity=quantity)
            boxes = [_boxes(model, where(subset, model=model)) for model in measured]
            printed = {LABELS["transject"]: FACTOR} if quantity == _DRAWN[0] else {}
            if quantity == "entropy" and study.name == "imdb":
                printed = ENTROPY
            models = list(measured)
            drawn = [
                _printed_line(model, at, subset, models.index(model))
                for model, at in printed.items()
            ]
            panels.append(Panel(study.name, "layer", quantity, [*boxes, *drawn]))
        factors, untrained, entropies = (
            {model: [measure(seed) for seed in seeds] for model, seeds in measured.items()}
            for measure in (
                lambda seed: seed[1].median_factor(),
                lambda seed: seed[2].median_factor(),
                lambda seed: seed[1].entropy(),
            )
        )
        by_factor, at_first, by_entropy = (
            listing(f"{model} {mean_se(values)}" for model, values in table.items())
            for table in (factors, untrained, entropies)
        )
        plains = [scale.model_name("post_ln") for scale in study.scales()]
        alone = all(within(factors[plain], low=_TOO_LOW) is False for plain in plains)
        runs += [
            run for model in measured if model in plains or not alone for run, *_ in measured[model]
        ]
        scores = [
            100 * run.metric("accuracy,test") for seeds in measured.values() for run, *_ in seeds
        ]
        factor, entropy = (list(itertools.chain(*table.values())) for table in (factors, entropies))
        texts.append(
            f"{study.name}: median activation factor {by_factor}, before training {at_first}; entropy"
            f" {by_entropy}{_correlations(factor, entropy, scores)}"
        )
        for plain in plains:
            sides = LABELS["transject"], plain
            after, before = ([table[side] for side in sides] for table in (factors, untrained))
            verdicts.append(by_training(judge_figure_3a, _ratios, after, before))

    got = "; ".join(texts)
    holds = agreed(verdicts)
    return judged(request, rows, panels, got, holds, runs, notes=_NOTES)


def judge_figure_3a(transject: Sequence[float], transformer: Sequence[float]) -> Verdict:
    high = within(_ratios(transject, transformer), low=_MUCH_HIGHER)
    return every((within(transject, *_ABOUT_1), high))


def _ratios(transject: Sequence[float], transformer: Sequence[float]) -> list[float]:
    return [plain / ours for plain, ours in zip(transformer, transject, strict=False)]


def _measured(
    request: Request, study: Study, variants: Sequence[str]
) -> dict[str, list[tuple[FinishedRun, Layers, Layers]]]:
    """Train a study; return, by model, every run with its measures after training and before."""
    task, runs = train_study(request, study, variants=variants)
    batches = probe_batches(request, task)
    measured: dict[str, list[tuple[FinishedRun, Layers, Layers]]] = {}
    for run in runs:
        if run.metrics:
            after, before = (measure_layers(model, batches) for model in (run.model, run.untrained))
            measured.setdefault(study.model_name(run.variant), []).append((run, after, before))
    missing = {study.model_name(variant) for variant in variants}.difference(measured)
    if missing:
        raise ConfigError(f"{study.name}: training diverged for {', '.join(sorted(missing))}")
    return measured


def _layer_rows(task: str, model: str, seeds: Sequence[Layers]) -> list[Row]:
    """Return quartiles over the sequences of all seeds, for each layer of each quantity."""
    quantities = {
        f"activation factor, {metric}": [seed.factors[metric] for seed in seeds]
        for metric in METRICS
    }
    quantities["entropy"] = [seed.entropies for seed in seeds]
    rows = []
    for quantity, by_seed in quantities.items():
        first = 0 if quantity.startswith("entropy") else 1
        for layer, of_layer in enumerate(zip(*by_seed, strict=True), start=first):
            values = list(itertools.chain(*of_layer))
            row = {"task": task, "model": model, "quantity": quantity, "layer": layer}
            rows.append({**row, "mean": fmean(values), **_box(values)})

    return rows


def _box(values: Sequence[float]) -> dict[str, float]:
    return {name: quantile(values, index / 4) for index, name in enumerate(_PARTS)}


def _correlations(
    factor: Sequence[float], entropy: Sequence[float], accuracy: Sequence[float]
) -> str:
    """Return a text on the correlations over models and seeds; empty if nothing varies."""
    from scipy import stats

    columns = (factor, entropy, accuracy)
    if len(factor) < 3 or any(min(column) == max(column) for column in columns):
        return ""
    linear: Any = stats.pearsonr(factor, accuracy)
    ranked: Any = stats.spearmanr(factor, entropy)
    return (
        f"; r(factor, accuracy) {linear.statistic:.2f} (p {linear.pvalue:.2f}), "
        f"Spearman(factor, entropy) {ranked.statistic:.2f} (n = {len(factor)})"
    )


def _boxes(label: str, rows: Sequence[Row]) -> Series:
    """Return the median and quartiles by layer, without layers that have an infinite part."""
    drawn = [row for row in rows if all(math.isfinite(row[name]) for name in _PARTS)]
    _, lower, median, upper, _ = ([row[name] for row in drawn] for name in _PARTS)
    return Series(label, [row["layer"] for row in drawn], median, band=(lower, upper))


def _printed_line(label: str, height: float, rows: Sequence[Row], colour: int) -> Series:
    layers = [row["layer"] for row in rows]
    ends = [min(layers), max(layers)]
    return Series(f"paper, {label}", ends, [height, height], "dashed", colour)


@recipe(
    "sengupta2023/figure-3b",
    takes=("data",),
    power=Power(
        imdb_seeds,
        "mean entropy of heads and experts, in nats",
        0.025,
        "experts less heads on IMDb",
    ),
)
def figure_3b(request: Request) -> Reproduction:
    """Entropy of each head and each expert by layer (the runs of table 1).

    Claim: the mean entropy of experts is -2.2, that of attention heads 0.67.
    Quote: "The expert entropy value of TransJect is" (appendix C).
    Test: none. The entropy of c X is that of X plus ln c, and the paper prints no scale of its states.
        With one scale experts are below heads and with another above, whatever was trained.
    Note: heads are narrower than experts, so their entropy rests on fewer values. Drawn: parts of
        all seeds, and the printed means.
    """
    experts = LABELS["transject"]
    heads = LABELS["post_ln"]
    rows: list[Row] = []
    means: dict[str, list[float]] = {}
    untrained: dict[str, list[float]] = {}
    runs: list[FinishedRun] = []
    study = text_study(request, "imdb")
    for scaled, variants in zip(
        study.scales(), (("transject", "post_ln"), ("post_ln",)), strict=True
    ):
        task, trained = train_study(request, scaled, variants=variants)
        batches = probe_batches(request, task)
        for run in trained:
            kind = "expert" if run.variant == "transject" else "head"
            label = scaled.model_name(run.variant)
            layers, before = (
                part_entropies(model, batches) for model in (run.model, run.untrained)
            )
            for layer, values in enumerate(layers, start=1):
                common = {"model": label, "seed": run.seed, "layer": layer}
                for part, value in enumerate(values, start=1):
                    rows.append({**common, "part": f"{kind} {part}", "entropy": value})
            for into, parts in ((means, layers), (untrained, before)):
                into.setdefault(label, []).append(fmean(itertools.chain(*parts)))
        runs += trained

    drawn = []
    for model in means:
        boxes = []
        for layer in sorted({row["layer"] for row in rows}):
            mine = where(rows, model=model, layer=layer)
            boxes.append({"layer": layer, **_box([row["entropy"] for row in mine])})
        drawn.append(_boxes(model, boxes))

    for colour, model in enumerate((experts, heads)):
        drawn.append(_printed_line(model, PART_ENTROPY[model], rows, colour))
    texts = [
        f"{model} {mean_se(values)} ({mean_se(untrained[model])} before)"
        for model, values in means.items()
    ]
    panels = [Panel("entropy of heads and experts", "layer", "entropy (nats)", drawn)]
    got = f"mean entropy in nats of experts or heads, after training and before: {', '.join(texts)}"

    return judged(request, rows, panels, got, None, runs, notes=_NOTES)


@recipe("sengupta2023/figure-5", **_WEIGHTS)
def figure_5(request: Request) -> Reproduction:
    """Residual weights of TransJect by layer after training (the runs of tables 1 and 2).

    Claim: residual weights alpha remain below 0.33.
    Quote: "Residual weight values remain < 0.33" (appendix A.6).
    Test: |alpha|, not divided by the number of layers, of {LARGEST_WEIGHT:g} or more in some layer, by
        both starts of alpha, is against the claim. Smaller ones show nothing: alpha / L, which the
        figure may show, is below 1 / L whatever was trained, and alpha starts at 0.
    Note: the paper asks for ReZero (alpha = tanh(w), which starts at 0) and for alpha = sigmoid(w),
        which starts at one half. Both are trained, the latter for twice the steps.
    Note: {MINI_NOTE}.
    """
    rows: list[Row] = []
    panels = []
    texts = []
    verdicts = []
    runs: list[FinishedRun] = []
    for study in both_starts(request):
        mine: list[Row] = []
        moved: list[float] = []
        trained = train_study(request, study, variants=("transject",))[1]
        runs += trained
        for run in trained:
            alphas, before = map(residual_weights, (run.model, run.untrained))
            moved.append(max(abs(a - b) for a, b in zip(alphas, before, strict=True)))
            common = {"task": study.name, "seed": run.seed, "of": f"seed {run.seed}"}
            for layer, alpha in enumerate(alphas, start=1):
                share = {"alpha": alpha, "alpha_over_layers": alpha / len(alphas)}
                mine.append({**common, "layer": layer, **share})
        series = lines(mine, "layer", "alpha", by="of")
        level = (f"paper: below {LARGEST_WEIGHT:g}", LARGEST_WEIGHT)
        panels.append(Panel(study.name, "layer", "alpha", series, level=level))
        rows += mine
        weights = [row["alpha"] for row in mine]
        texts.append(
            f"{study.name}: largest |alpha| {max(map(abs, weights)):.3f} over {len(mine)} layers;"
            f" training moved the largest |alpha| by {min(moved):.3f} or more"
        )
        verdicts.append(judge_figure_5(weights))

    got = "; ".join(texts)
    holds = agreed(verdicts)
    return judged(request, rows, panels, got, holds, runs, uncertainty=AGREED)


def judge_figure_5(weights: Sequence[float]) -> Verdict:
    """Return False if a residual weight reaches a third; small ones show nothing."""
    return None if max(map(abs, weights)) < LARGEST_WEIGHT else False


@recipe("sengupta2023/figure-7", **_WEIGHTS)
def figure_7(request: Request) -> Reproduction:
    """Weights of the experts over test texts (the runs of tables 1 and 2).

    Claim: experts are balanced without a loss for it: the mode of their weights is about 0.25 of 4.
    Quote: "The mode around 0.25 highlights the inherent load-balancing capabilities among the
        experts" (caption of Figure 7).
    Test: the mean weight of every expert, in every layer of every seed, is within a factor 2 of
        even, by both starts of the residual weights. Undecided unless in every seed training has
        moved some weight of a text by half of even or more, as it must before any can leave that
        range: untrained gates are even, and a branch that is scaled by alpha / L < 1 / L moves them
        little.
    Note: drawn: all except the {_TAIL:0.1%} of weights at either end.
    Note: the paper asks for ReZero (alpha = tanh(w), which starts at 0) and for alpha = sigmoid(w),
        which starts at one half. Both are trained, the latter for twice the steps.
    Note: {MINI_NOTE}.
    """
    rows: list[Row] = []
    panels: list[Panel] = []
    texts = []
    verdicts = []
    runs: list[FinishedRun] = []
    for study in both_starts(request):
        task, trained = train_study(request, study, variants=("transject",))
        runs += trained
        batches = probe_batches(request, task)
        pooled: dict[int, list[float]] = {}
        means = []
        first = []
        moved = []
        even = 1 / study.sizes.experts
        for run in trained:
            both = [np.array(gate_weights(model, batches)) for model in (run.model, run.untrained)]
            moved.append(float(abs(both[0] - both[1]).max()))
            for into, weights in zip((means, first), both, strict=True):
                into += weights.mean(1).ravel().tolist()
            for layer, weights in enumerate(both[0].tolist(), start=1):
                pooled.setdefault(layer, []).extend(itertools.chain(*weights))
                row = {"task": study.name, "seed": run.seed, "layer": layer}
                for expert, of_expert in enumerate(zip(*weights, strict=True), start=1):
                    lower, upper = (quantile(of_expert, share) for share in (0.25, 0.75))
                    quartiles = {"lower_quartile": lower, "upper_quartile": upper}
                    mean = {"expert": expert, "mean_weight": fmean(of_expert)}
                    rows.append({**row, **mean, **quartiles})
        values = [*itertools.chain(*pooled.values()), GATE_MODE]
        reach = (quantile(values, _TAIL), quantile(values, 1 - _TAIL))
        series = [_histogram(f"layer {layer}", weights, reach) for layer, weights in pooled.items()]
        height = [0, max(max(bars.y) for bars in series)]
        mode = f"paper: mode about {GATE_MODE:g}"
        series.append(Series(mode, [GATE_MODE, GATE_MODE], height, "dashed"))
        panels.append(Panel(study.name, "expert weight", "share of weights", series))
        texts.append(
            f"{study.name}: mean weight of an expert {spanned(means)}, before training {spanned(first)},"
            f" {even:g} being even; training moved some weight of a text by {min(moved):.3f} or more"
        )
        verdicts.append(judge_figure_7(means, even, moved))

    got = "; ".join(texts)
    holds = agreed(verdicts)
    return judged(request, rows, panels, got, holds, runs, uncertainty=AGREED)


def judge_figure_7(means: Sequence[float], even: float, moved: Sequence[float]) -> Verdict:
    """Return whether every expert is used about evenly; None if training moved weights little."""
    return max(means) < 2 * even and min(means) > even / 2 if min(moved) > even / 2 else None


def _histogram(label: str, values: Sequence[float], reach: tuple[float, float]) -> Series:
    counts, edges = np.histogram(values, 20, range=reach)
    centres = (edges[:-1] + edges[1:]) / 2
    shares = counts / len(values)
    return Series(label, centres.tolist(), shares.tolist(), "bars")


_SWEPT = (
    ("transject", "experts"),
    ("transject", "layers"),
    ("post_ln", "layers"),
    ("post_ln", "dropout"),
)
_QUANTITIES = {
    "activation_factor": "median activation factor, last layer",
    "entropy": "entropy, mean of layers",
}
Changes = Mapping[tuple[str, str], Sequence[float]]
"""Change of a quantity per seed, by model and option."""


@recipe("sengupta2023/figure-6", **FACTORS)
def figure_6(request: Request) -> Reproduction:
    """Activation factor and entropy against experts, layers and dropout (data: imdb).

    Claim: more experts raise the activation at the last layer. More layers raise it for Transformer
        and not for TransJect. More dropout lowers activation and entropy of Transformer.
    Quote: "more experts in MOE increase activation at the final layer" (appendix C).
    Test: each option goes from the smallest to the largest value tried. Experts raise the
        activation factor of TransJect, and dropout lowers the Transformer's. Layers raise that of
        the Transformer by more than they change TransJect's. Undecided if the scales of embeddings
        disagree. If the Transformer's own numbers contradict, TransJect is not judged.
    Note: dropout also on the embeddings. At mini scale every model trains for twice the steps of
        table 1, as some seeds of TransJect were still learning after as many.
    """
    study = text_study(request, "imdb")
    steps = study.sizes.steps * (2 if request.scale == "mini" else 1)
    tried = {"experts": (1, 4, 8), "layers": (1, 2, 4), "dropout": (0.0, 0.2, 0.4)}
    if request.scale == "toy":
        tried = {"experts": (1, 2), "layers": (1, 2), "dropout": (0.0, 0.3)}

    rows: list[Row] = []
    runs: list[FinishedRun] = []
    change: dict[tuple[str, str], list[float]] = {}
    task, _ = train_study(request, study, variants=("transject",), seeds=())
    batches = probe_batches(request, task)
    for variant, option in _SWEPT:
        for scale in study.scales()[: 1 if variant == "transject" else 2]:
            tuned = tuned_study(request, scale, task, (variant,))
            ends = []
            for value in tried[option]:
                changed = tuned.resized(f"{option}{value:g}", **{option: value, "steps": steps})
                _, trained = train_study(request, changed, variants=(variant,), task=task)
                runs += trained
                mine = [
                    {
                        "model": scale.model_name(variant),
                        "option": option,
                        "value": value,
                        "seed": run.seed,
                        "activation_factor": layers.median_factor(),
                        "entropy": layers.entropy(),
                        "accuracy": 100 * run.metric("accuracy,test"),
                    }
                    for run in trained
                    if run.metrics
                    for layers in [measure_layers(run.model, batches)]
                ]
                rows += mine
                ends.append([row["activation_factor"] for row in mine])
            alike = len(ends[0]) == len(ends[-1])
            change[scale.model_name(variant), option] = minus(ends[-1], ends[0]) if alike else []

    panels = []
    for (quantity, title), (variant, option) in itertools.product(_QUANTITIES.items(), _SWEPT):
        names = dict.fromkeys(scale.model_name(variant) for scale in study.scales())
        series = [
            mean_series(where(rows, model=name, option=option), "value", quantity, name)
            for name in names
        ]
        panels.append(Panel(f"{LABELS[variant]}: {option}", option, title, series))

    moved = {case: values for case, values in change.items() if values}
    texts = [f"{model}: {option} {mean_se(seeds)}" for (model, option), seeds in moved.items()]
    got = f"change of the activation factor from smallest to largest value: {', '.join(texts)}"
    plains = [scale.model_name("post_ln") for scale in study.scales()]
    holds = agreed([judge_figure_6(change, plain) for plain in plains])
    if agreed([judge_transformer(change, plain) for plain in plains]) is False:
        runs = [run for run in runs if run.variant == "post_ln"]

    return judged(request, rows, panels, got, holds, runs, notes=(NEIGHBOURS_NOTE, SCALE_NOTE))


def judge_transformer(change: Changes, plain: str) -> Verdict:
    """Return whether layers raise the Transformer's factor, and dropout lowers it."""
    return every((within(change[plain, "layers"], low=0), within(change[plain, "dropout"], high=0)))


def judge_figure_6(change: Changes, plain: str) -> Verdict:
    ours = [abs(value) for value in change[LABELS["transject"], "layers"]]
    deeper = change[plain, "layers"]
    return every(
        (
            within(change[LABELS["transject"], "experts"], low=0),
            within(minus(deeper, ours) if len(deeper) == len(ours) else [], low=0),
            within(change[plain, "dropout"], high=0),
        )
    )
