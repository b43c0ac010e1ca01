"""Huang et al. (2020): how large the signal is after every layer, with Xavier weights and with
T-Fixup's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from wellposed.charts import Panel, Row, Style, medians, where
from wellposed.errors import ConvergenceError
from wellposed.initialize import signal_propagation
from wellposed.recipes.recipe import Criterion, Reproduction, Request, recipe
from wellposed_studies.huang2020.random_models import random_model
from wellposed_studies.study import spanned
from wellposed_studies.verdicts import AGREED, agreed

INITS = {"xavier": "Xavier", "t_fixup": "T-Fixup"}
STACKS = ("encoder", "decoder")
_LOW, _HIGH, _GREW = 0.95, 1.15, 11.5
_DRAWS = 3
_SHOWN = 1e12
"""What is larger is left out of the figure."""


@recipe("huang2020/signal", measured={"mini": 0.3, "medium": 0.7}, estimated={"paper": 15})
def signal(request: Request) -> Reproduction:
    """|out|/|in| after every layer at initial weights, Xavier and T-Fixup.

    Claim: with |v_e| = |w_e| = 0.67 N^-1/4 the encoder's output is of the size of its input at
    any depth N

    Test: |out|/|in| of T-Fixup's encoders is between {_LOW:g} and {_HIGH:g} at every depth, that of
    Xavier's deepest above {_GREW:g}

    Note: root mean square norms of tokens in a forward pass of random tokens, float64, no
    LayerNorm on either side

    Note: the paper's claim is about the size of an update; this is the forward signal that its
    derivation needs
    """
    width = request.pick(toy=16, mini=64, medium=128, paper=512)
    depths = request.pick(
        toy=(1, 3), mini=(6, 20, 100), medium=(6, 20, 100, 200), paper=(6, 20, 100)
    )
    rows: list[dict[str, Any]] = []
    for depth, (init, label), seed in itertools.product(depths, INITS.items(), range(_DRAWS)):
        request.announce(f"{label}, {depth}+{depth} layers of width {width}, seed {seed}")
        rows += _measure(init, depth, width, seed)
    last = [row for row in rows if row["layer"] == row["depth"]]
    by_seed = [
        judge_signal(
            *(
                _ratios(last, init=init, stack="encoder", seed=seed)
                for init in ("T-Fixup", "Xavier")
            )
        )
        for seed in range(_DRAWS)
    ]
    said = {
        (init, stack): ", ".join(
            spanned(_ratios(last, init=init, stack=stack, depth=depth)) for depth in depths
        )
        for init, stack in itertools.product(INITS.values(), STACKS)
    }
    panels = [
        *(_beside_xavier(rows, stack) for stack in STACKS),
        *(
            Panel(
                f"{stack}, T-Fixup alone",
                "layer",
                "|out| / |in|",
                medians(where(rows, init="T-Fixup", stack=stack), "layer", "ratio", by=_name),
                x_scale="log",
                y_limits=(0.9, 1.2),
            )
            for stack in STACKS
        ),
    ]
    return Reproduction(
        rows,
        panels,
        got=(
            f"|out|/|in| of encoders of {', '.join(map(str, depths))} layers: T-Fixup"
            f" {said['T-Fixup', 'encoder']}; Xavier {said['Xavier', 'encoder']}; of decoders:"
            f" T-Fixup {said['T-Fixup', 'decoder']}"
        ),
        holds=agreed(by_seed),
        criterion=Criterion("", _DRAWS, f"{AGREED}; a ratio is a mean over all tokens"),
    )


def judge_signal(t_fixup: Sequence[float], xavier: Sequence[float]) -> bool:
    """Say whether T-Fixup keeps the size of the signal at every depth and Xavier does not."""
    return all(_LOW <= value <= _HIGH for value in t_fixup) and xavier[-1] > _GREW


def _beside_xavier(rows: Sequence[Row], stack: str) -> Panel:
    shown = [row for row in where(rows, stack=stack) if row["ratio"] < _SHOWN]
    styles: dict[str, Style] = {"Xavier": "dashed", "T-Fixup": "solid"}
    series = [
        replace(each, colour=number)
        for init, style in styles.items()
        for number, each in enumerate(
            medians(where(shown, init=init), "layer", "ratio", by=_name, style=style)
        )
    ]
    return Panel(stack, "layer", "|out| / |in|", series, x_scale="log", y_scale="log")


def _ratios(rows: Sequence[Row], **of: Any) -> list[float]:
    return [row["ratio"] for row in where(rows, **of)]


def _name(row: Row) -> str:
    return f"{row['init']}, {row['depth']} layers"


def _measure(init: str, depth: int, width: int, seed: int) -> list[dict[str, Any]]:
    model = random_model(depth, width, seed, heads=max(4, width // 64), norm="none", init=init)
    tokens = torch.randint(4, 100, (4, 16), generator=torch.Generator().manual_seed(seed))
    batch = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "decoder_input_ids": tokens.flip(1),
    }
    common = {"init": INITS[init], "depth": depth, "seed": seed}
    try:
        found = signal_propagation(model, batch)
    except ConvergenceError:
        return [{**common, "stack": stack, "layer": depth, "ratio": math.inf} for stack in STACKS]
    return [
        {**common, "stack": row.stack, "layer": row.depth, "ratio": row.ratio} for row in found.rows
    ]
