"""Kim et al. (2021): the character-level language models of the figures, and their training."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from wellposed_lab.training.config import RunConfig
from wellposed_studies import study
from wellposed_studies.recipe import Request
from wellposed_studies.study import FinishedRun, Sizes, train_grid
from wellposed_studies.tuning import at_rates, tune
from wellposed_studies.verdicts import Power

READS: dict[str, Any] = {
    "folders": (
        "ptb/ptb.char.train.txt.gz",
        "ptb/ptb.char.train.txt",
        "ptb.char.train.txt.gz",
        "ptb.char.train.txt",
    ),
    "takes": ("data",),
    "builtin": "English prose that ships with Python",
}
"""Keywords of `recipe` for recipes that train on text."""
HEADS = 8
LABELS = {
    "dot_product": "dot product",
    "l2": "L2",
    "l2_tied": "tied L2",
    "l2_contractive_kim2021": "contractive L2, Theorem 3.2",
    "l2_contractive": "contractive L2, sharp bound",
    "l2_tied_wide": "tied L2, twice the columns",
    "lstm": "LSTM",
}
# The paper divides by its bound in norm inf. The sharp bound is also proved, and smaller.
_CONTRACTIVE = {"attention": "l2_contractive", "contractive": 0.999, "lipschitz_norm": "inf"}
ATTENTIONS: Mapping[str, Mapping[str, Any]] = {
    "dot_product": {"attention": "dot_product"},
    "l2": {"attention": "l2"},
    "l2_tied": {"attention": "l2_tied"},
    "l2_contractive_kim2021": {**_CONTRACTIVE, "contractive_bound": "kim2021"},
    "l2_contractive": {**_CONTRACTIVE, "contractive_bound": "sharp"},
    "l2_tied_wide": {"attention": "l2_tied", "query_width": 2},
    "lstm": {"architecture": "lstm", "activation": "gelu", "position": "learned"},
}
"""Options of `ModelOptions` by the recipe's name of a model."""
CONTRACTIVE = ("l2_contractive_kim2021", "l2_contractive")
SMALL_SCALE = 2.0**-4
"""Initial scale s of L2 attention in appendix I, for D = 512."""


def tuned(request: Request) -> Sizes:
    """Return the runs with the schedule of appendix I, gamma 0.5; at paper scale one layer only."""
    return study.sizes_at(request, "kim2021/tuned")


def fixed(request: Request) -> Sizes:
    """Return the runs at a fixed rate, the best of three (the paper does not print its own)."""
    return study.sizes_at(request, "kim2021/fixed")


def one_layer(request: Request) -> Sizes:
    """Return one layer of `tuned`, at mini scale of less text."""
    sizes = replace(tuned(request), depths=(1,))
    return replace(sizes, steps=2500, limit=5000) if request.scale == "mini" else sizes


ONE_LAYER: dict[str, Any] = {"estimated": {"paper": 360}, "power": Power(one_layer), **READS}
"""Keywords of `recipe` for recipes that examine one trained layer."""


def run_config(
    request: Request, sizes: Sizes, kind: str, depth: int, *, seed: int = 0
) -> RunConfig:
    """Return a post-LN run with Adam (0.9, 0.98), no clipping or decay; warm-up as in the paper."""
    task_options = {
        "seq_len": sizes.seq_len,
        "data": request.data,
        "limit_chars": sizes.limit,
        "examples": sizes.options.get("examples"),
    }
    l2 = str(ATTENTIONS[kind].get("attention", "")).startswith("l2")
    scale = sizes.options.get("init_scale", SMALL_SCALE)
    model = {
        "intermediate_size": None,
        "activation": "relu",
        "position": "sinusoidal",
        "tie_word_embeddings": False,
        **({"init": "kim2021", "l2_init_scale": scale} if l2 else {}),
        **ATTENTIONS[kind],
    }
    config = study.run_config(
        "char_lm",
        task_options,
        replace(sizes, layers=depth),
        seed=seed,
        model=model,
        schedule="kim2021" if sizes.warmup else "constant",
        gamma=sizes.options.get("gamma", 0.5) if sizes.warmup else 1.0,
        weight_decay=0.0,
        max_grad_norm=0.0,
        patience=sizes.options.get("patience"),
    )

    return replace(config, variant=kind)


def train_models(
    request: Request, group: str, kinds: Sequence[str], sizes: Sizes
) -> list[FinishedRun]:
    """Train each kind at each depth and seed, at the rate with the lowest loss on valid."""
    train = partial(train_grid, request, test_batches=sizes.eval_batches)
    runs = []
    for kind, depth in itertools.product(kinds, sizes.depths):

        def config(rate: float, seed: int, kind: str = kind, depth: int = depth) -> RunConfig:
            return run_config(request, replace(sizes, learning_rate=rate), kind, depth, seed=seed)

        folder = request.runs(group) / f"{kind}-{depth}"
        label = f"{LABELS[kind]}, {depth} layers"
        runs += tune(
            train,
            at_rates(folder, label, config),
            sizes.rates or (sizes.learning_rate,),
            sizes.seeds,
            score=lambda run: -nll(run, "valid"),
        ).runs
    return runs


def train_one_layer(request: Request, kind: str) -> list[FinishedRun]:
    """Return one-layer language models, one a seed; later recipes reuse them."""
    return train_models(request, "trained", (kind,), one_layer(request))


def attentions_of(runs: Sequence[FinishedRun]) -> list[Any]:
    layers = [run.model.base_model.layers[0] for run in runs]
    return [layer.attention.eval().requires_grad_(False) for layer in layers]


def nll(run: FinishedRun, split: str = "test") -> float:
    return run.metric(f"nats_per_char,{split}", math.inf)


def pair_entropy(run: FinishedRun) -> float:
    """Return nats of a test character given the one before; a model below it uses its context."""
    import numpy as np

    from wellposed_lab.tasks.task import build_task

    task: Any = build_task(run.config.task, run.config.task_options)
    tokens = np.asarray(task.dataset("test").tokens)
    first = tokens[:-1].astype(np.int64)
    second = tokens[1:].astype(np.int64)

    def entropy(ids: Any) -> float:
        shares = np.unique(ids, return_counts=True)[1] / len(first)
        return float(-(shares * np.log(shares)).sum())

    return entropy(first * (tokens.max() + 1) + second) - entropy(first)


def character_entropy(run: FinishedRun) -> float:
    """Return the entropy of single characters in nats."""
    return float(run.reference["nats_per_char"])
