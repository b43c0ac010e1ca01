"""Huang et al. (2020): how far one step of SGD moves the output, over its rate, by depth: the goal
of the paper."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from wellposed.charts import Panel, Row, Series, where
from wellposed.initialize import step_change
from wellposed.recipes.recipe import Criterion, Reproduction, Request, recipe
from wellposed_studies.huang2020.random_models import random_model
from wellposed_studies.study import exponent, mean_and_error, said
from wellposed_studies.verdicts import UNCERTAINTY, every, within

T_FIXUP, XAVIER = "T-Fixup", "Xavier, no LayerNorm"
MODELS: Mapping[str, Mapping[str, Any]] = {
    T_FIXUP: {"init": "t_fixup", "norm": "none"},
    XAVIER: {"init": "xavier", "norm": "none"},
    "post-LN": {"init": "xavier", "norm": "post"},
    "pre-LN": {"init": "xavier", "norm": "pre"},
}
ENCODER, WHOLE = "encoder", "encoder-decoder"
_DEPTHS = (6, 12, 25, 50, 100)
_FLAT, _GROWS = 0.15, 1.0
_SHOWN = 1e20
"""What is larger is left out of the figure, which is to show the others."""


@recipe("huang2020/updates", measured={"mini": 1.9, "medium": 1.9}, estimated={"paper": 60})
def updates(request: Request) -> Reproduction:
    """|change of f| / rate of one SGD step by depth: T-Fixup, Xavier without LayerNorm, post-LN,
    pre-LN.

    Claim: f is updated by Theta(rate) in a step of SGD, independent of model depth (the goal of
    section 3.2)

    Test: with T-Fixup the exponent of N in |change of f| / rate is between -{_FLAT:g} and
    {_FLAT:g} for encoder and encoder-decoder, and with Xavier's weights and no LayerNorm it is
    above {_GROWS:g}

    Note: f is the memory of the encoder, or the decoder's last hidden states; the gradient of
    the loss in f is a random direction of norm 1 (assumption 4); float64, the limit of small
    rates

    Note: matrices and embeddings are stepped, as in the derivation; it leaves out biases, whose
    steps make the change grow with depth

    Note: Adam is not treated in the text at hand
    """
    depths: tuple[int, ...] = request.pick(
        toy=(1, 2, 4), mini=_DEPTHS, medium=_DEPTHS, paper=(*_DEPTHS, 200)
    )
    width = request.pick(toy=8, mini=32, medium=128, paper=512)
    seeds: int = request.pick(toy=2, mini=3, medium=5, paper=5)
    rows: list[dict[str, Any]] = []
    for label, depth in itertools.product(MODELS, depths):
        request.announce(f"{label}, {depth}+{depth} layers of width {width}")
        rows += [row for seed in range(seeds) for row in _measure(label, depth, width, seed)]
    flat = {stack: _exponents(rows, T_FIXUP, stack, seeds) for stack in (ENCODER, WHOLE)}
    grows = {stack: _exponents(rows, XAVIER, stack, seeds) for stack in (ENCODER, WHOLE)}
    powers = ", ".join(f"{stack} {said(slopes)}" for stack, slopes in flat.items())
    return Reproduction(
        rows,
        [_panel(rows, stack, depths) for stack in (ENCODER, WHOLE)],
        got=(
            f"|change of f| / rate goes with T-Fixup as N to the power of {powers}; of the"
            f" encoder-decoder at {', '.join(map(str, depths))} layers:"
            f" {'; '.join(_said(rows, label, depths) for label in MODELS)}; with biases stepped too"
            f" {_said(rows, T_FIXUP, depths, 'change_with_biases')}"
        ),
        holds=judge_updates(flat, grows),
        criterion=Criterion("", seeds, UNCERTAINTY),
    )


def judge_updates(
    t_fixup: Mapping[str, Sequence[float]], xavier: Mapping[str, Sequence[float]]
) -> bool | None:
    """Say whether the size of an update does not depend on depth with T-Fixup, and does without
    it."""
    flat = [within(slopes, -_FLAT, _FLAT) for slopes in t_fixup.values()]
    return every([*flat, *(within(slopes, low=_GROWS) for slopes in xavier.values())])


def _measure(label: str, depth: int, width: int, seed: int) -> list[dict[str, Any]]:
    model = random_model(depth, width, seed, **MODELS[label]).eval()
    tokens = torch.randint(4, 100, (2, 8))
    parts = {
        ENCODER: (model.model.encoder, tokens),
        WHOLE: (model.model, {"input_ids": tokens, "decoder_input_ids": tokens.flip(1)}),
    }
    return [
        {
            "model": label,
            "stack": stack,
            "layers_each_side": depth,
            "seed": seed,
            "change_over_rate": _change(part, batch, biases=False),
            "change_with_biases": _change(part, batch, biases=True),
        }
        for stack, (part, batch) in parts.items()
    ]


def _change(model: torch.nn.Module, batch: Any, *, biases: bool) -> float:
    """Return the change of the output over the rate; infinite where it overflows."""
    change = step_change(model, batch, lr=None, biases=biases)
    return change if math.isfinite(change) else math.inf


def _exponents(rows: Sequence[Row], label: str, stack: str, seeds: int) -> list[float]:
    mine = [where(rows, model=label, stack=stack, seed=seed) for seed in range(seeds)]
    return [
        exponent(
            [row["layers_each_side"] for row in each], [row["change_over_rate"] for row in each]
        )
        for each in mine
    ]


def _means(rows: Sequence[Row], column: str, depths: Sequence[int], **wanted: Any) -> list[float]:
    return [
        mean_and_error([row[column] for row in where(rows, layers_each_side=depth, **wanted)])[0]
        for depth in depths
    ]


def _said(
    rows: Sequence[Row], label: str, depths: Sequence[int], column: str = "change_over_rate"
) -> str:
    means = _means(rows, column, depths, model=label, stack=WHOLE)
    return f"{label} " + ", ".join(
        f"{value:.3g}" if math.isfinite(value) else "overflow" for value in means
    )


def _panel(rows: Sequence[Row], stack: str, depths: Sequence[int]) -> Panel:
    series = []
    for number, label in enumerate(MODELS):
        means = _means(rows, "change_over_rate", depths, model=label, stack=stack)
        shown = {depth: mean for depth, mean in zip(depths, means, strict=True) if mean < _SHOWN}
        series += [Series(label, list(shown), list(shown.values()), colour=number)] if shown else []
    return Panel(
        stack, "layers each side", "|change of f| / rate", series, x_scale="log", y_scale="log"
    )
