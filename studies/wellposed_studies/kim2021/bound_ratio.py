"""Kim et al. (2021), Theorem 3.2 beside the sharper proved forms: how much of the branch a
contractive layer keeps."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import torch

from wellposed.charts import Panel, lines, where
from wellposed.linalg import kim2021_bound
from wellposed.nn import L2SelfAttention
from wellposed.recipes.recipe import Criterion, Reproduction, Request, recipe
from wellposed_studies.verdicts import AGREED

NORMS: tuple[Literal["inf", 2], ...] = ("inf", 2)
_CONTRACTIVE = 0.999
_INIT = 2.0**-4


@recipe("kim2021/bound-ratio", measured={"mini": 0.2, "medium": 0.2}, estimated={"paper": 1})
def bound_ratio(request: Request) -> Reproduction:
    """The bound of Theorem 3.2 over the sharper one, by width, tokens and norm.

    Claim: Theorem 3.2 is an upper bound; contractive L2 attention is divided by it

    Test: the bound of Theorem 3.2 is nowhere below the sharper one, which is proved as well

    Note: at c = {_CONTRACTIVE:g} a layer that is divided by its bound keeps c / bound of its
    output, so that with the paper's bound the branch starts smaller by the ratio

    Note: weights uniform in +-{_INIT:g} / sqrt(D), appendix I

    Note: in norm 2 with the fourth power of W_Q: with the printed second power it is no bound
    """
    sizes, lengths, seeds = request.pick(
        toy=([(16, 2)], [4, 8], 1),
        mini=([(64, 8), (128, 8), (512, 8)], [64, 288], 3),
        medium=([(64, 8), (128, 8), (512, 8), (1024, 16)], [64, 288, 1024], 5),
        paper=([(64, 8), (128, 8), (512, 8), (1024, 16)], [64, 288, 1024], 3),
    )
    rows: list[dict[str, Any]] = []
    for (width, heads), seed in itertools.product(sizes, range(seeds)):
        request.announce(f"D = {width}, H = {heads}, seed {seed}")
        torch.manual_seed(seed)
        layer = L2SelfAttention(width, heads, init_scale=_INIT).requires_grad_(False)
        rows += [
            {
                "D": width,
                "H": heads,
                "N": tokens,
                "norm": str(norm),
                "seed": seed,
                **_bounds(layer, tokens, norm),
            }
            for tokens, norm in itertools.product(lengths, NORMS)
        ]
    width, heads = sizes[-1]
    said = [
        f"norm {row['norm']}: {row['kim2021']:.2g} against {row['sharp']:.2g},"
        f" {row['ratio']:.0f} times"
        for row in where(rows, D=width, N=lengths[-1], seed=0)
    ]
    panels = []
    for norm in NORMS:
        mine = where(rows, norm=str(norm), seed=0)
        series = lines(mine, "N", "ratio", by=lambda row: f"D = {row['D']}")
        title = f"Theorem 3.2 over the sharper bound, norm {norm}"
        panels.append(Panel(title, "N", "ratio", series, y_scale="log"))
    return Reproduction(
        rows,
        panels,
        got=f"at D = {width}, H = {heads}, N = {lengths[-1]}: {', '.join(said)}",
        holds=judge_ratio([row["ratio"] for row in rows]),
        criterion=Criterion("", seeds, AGREED),
    )


def judge_ratio(ratios: list[float]) -> bool:
    """Say whether the printed bound is confirmed as an upper bound of the proved one."""
    return min(ratios) >= 1


def _bounds(layer: L2SelfAttention, tokens: int, norm: Literal["inf", 2]) -> dict[str, float]:
    assert layer.v_proj is not None
    query, value = (
        projection.weight.double().unflatten(0, (layer.num_heads, -1)).mT
        for projection in (layer.q_proj, layer.v_proj)
    )
    printed = float(
        kim2021_bound(query, value, layer.o_proj.weight.double().mT, seq_len=tokens, norm=norm)
    )
    sharp = float(layer.lipschitz_bound(tokens, norm=norm))
    return {
        "kim2021": printed,
        "sharp": sharp,
        "ratio": printed / sharp,
        "branch_factor_kim2021": _CONTRACTIVE / printed,
        "branch_factor_sharp": _CONTRACTIVE / sharp,
    }
