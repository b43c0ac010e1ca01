"""Seconds of `certify` for deep encoders, and the extra time of its cross-check."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.rows import Benchmark, Goal, Row, Setup, row_of
from wellposed.certification import certify
from wellposed.models import WellposedConfig, WellposedForSequenceClassification, WellposedModel
from wellposed.nn import DotProductAttention, L2SelfAttention

FIXED_COST = (
    "At any size the check runs the module three times forward and once backward: 0.8 ms for a linear map, 1 to 4 ms"
    " for an attention or a block of width 128. Bounds of small weights take only a few products."
)
FLOPS = (
    "Measured beside other work on both cores. Two certified norms, a product and two Gram matrices of a"
    " feed-forward take 90 ms a layer; a batch of layers takes longer than one after the other."
)
DEEP = (
    ("tok", "l2_tied"), ("tok", "dot_product"), ("tok", "cosine"),
    (2, "l2_tied"), (2, "l2_contractive"), (2, "dot_product"), (2, "cosine"),
)  # fmt: skip
"""Norm and attention of the deep encoders."""


def config(width: int, layers: int, tokens: int, attention: str) -> WellposedConfig:
    return WellposedConfig(
        hidden_size=width, num_attention_heads=max(1, width // (64 if width >= 512 else 32)), attention=attention,
        num_hidden_layers=layers, norm="none", intermediate_size=4 * width, max_position_embeddings=tokens,
    )  # fmt: skip


def modules(setup: Setup) -> Iterator[tuple[str, nn.Module, float | None]]:
    """Yield name, module and ball radius for the cross-check."""
    for width in setup.size((128, 512, 768), (64,)):
        heads = width // 64
        yield f"nn.Linear, D = {width}", nn.Linear(width, width), None
        yield f"L2 attention, D = {width}", L2SelfAttention(width, heads), None
        yield (
            f"contractive L2, D = {width}",
            L2SelfAttention(width, heads, contractive=0.9, max_tokens=128),
            None,
        )
        yield f"dot product on a ball, D = {width}", DotProductAttention(width, heads), 1.0
    for width, layers in setup.size(((64, 2), (128, 4), (256, 6)), ()):
        for attention in ("l2_tied", "l2_contractive", "cosine"):
            model = WellposedForSequenceClassification(config(width, layers, 128, attention))
            yield f"classifier {attention}, {layers} x {width}", model, None


def rows(setup: Setup) -> Iterator[Row]:
    width, layers, tokens = setup.size((512, 12, 512), (32, 1, 8))
    for norm, attention in DEEP:
        torch.manual_seed(0)
        model = WellposedModel(config(width, layers, tokens, attention)).eval()
        radius = 1.0 if attention == "dot_product" else None
        arguments: dict[str, Any] = {"seq_len": tokens, "norm": norm, "radius": radius}
        times = setup.interleave({"certify": partial(certify, model, **arguments)}, 3)["certify"]
        yield row_of(
            f"seconds of certify, {layers} x {width}, N = {tokens}, norm {norm}, {attention}",
            times,
        )
    for name, module, radius in modules(setup):
        module.eval()
        arguments = {"seq_len": 128, "radius": radius}
        sides = {
            key: partial(certify, module, **arguments, cross_check=key == "with")
            for key in ("without", "with")
        }
        times = setup.interleave(sides, 9)
        added = [a / b - 1 for a, b in zip(times["with"], times["without"], strict=True)]
        medians = (1e3 * statistics.median(times[key]) for key in ("with", "without"))
        yield row_of(
            f"cross-check, share of certify without it, {name}",
            added,
            ours=next(medians),
            other=next(medians),
        )


BENCHMARK = Benchmark(
    "seconds of certify for 12 layers of width 512 at 512 tokens, and the extra time of its cross-check",
    "<= 3 s, <= 20 %", 3, rows,
    goals=(Goal("seconds of certify*", "<= 3", FLOPS), Goal("cross-check*", "<= 0.2", FIXED_COST)),
)  # fmt: skip
