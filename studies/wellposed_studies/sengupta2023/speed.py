"""Sengupta et al. (2023), table 4: inference time against the length of the text, by N x N and by
fused attention."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellposed.charts import Panel, Row, lines, where
from wellposed.linalg import polar
from wellposed.models import build_model
from wellposed.recipes.recipe import Criterion, Reproduction, Request, recipe
from wellposed_studies.study import exponent, median_seconds, timing_device

PAPER = {
    "Transformer": (1.0, 1.0, 1.0, 1.0),
    "Transformer+ReZero": (1.0, 1.0, 1.0, 1.1),
    "Orthogonal Transformer": (1.0, 1.0, 1.1, 1.4),
    "TransJect": (5.0, 9.6, 12.8, 26.3),
}
# The paper's Transformers form the N x N weights; a user's would not. TransJect has no such kernel.
_FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
ATTENTIONS: dict[str, list[SDPBackend]] = {"N x N": [SDPBackend.MATH], "fused": _FUSED}
_PAPERS = "N x N"
_LENGTHS = (1024, 2048, 3072, 4096)
_BYTES = 258


@recipe("sengupta2023/table-4", measured={"mini": 1}, estimated={"medium": 10, "paper": 10})
def table_4(request: Request) -> Reproduction:
    """Inference speed over the Transformer's at 1k to 4k tokens, its attention N x N and fused.

    Claim: TransJect is 5.0, 9.6, 12.8 and 26.3 times as fast at 1k, 2k, 3k and 4k tokens

    Test: beside Transformers that form the N x N weights, as the paper's do, TransJect is
    faster by a factor that grows with the length, to at least 20 at 4k tokens
    """
    width, layers, experts, lengths, repeats = request.pick(
        toy=(16, 1, 2, (16, 32), 2),
        mini=(256, 2, 4, _LENGTHS, 3),
        medium=(512, 6, 4, _LENGTHS, 7),
        paper=(512, 6, 4, _LENGTHS, 20),
    )
    device = timing_device()
    models = {
        name: model.to(device)
        for name, model in build_models(width, layers, experts, max(lengths)).items()
    }
    rows: list[dict[str, Any]] = []
    for column, tokens in enumerate(lengths):
        request.announce(f"{tokens} tokens")
        ids = torch.randint(2, _BYTES, (1, tokens), device=device)
        calls = {
            f"{name}, {attention}": partial(_run, models[name], ids, attention)
            for attention, name in itertools.product(ATTENTIONS, models)
        }
        seconds = median_seconds(calls, repeats, warmup=1)
        for attention, name in itertools.product(ATTENTIONS, models):
            row: dict[str, Any] = {"attention": attention, "model": name, "tokens": tokens}
            if lengths == _LENGTHS:
                row["paper_speedup"] = PAPER[name][column]
            mine = seconds[f"{name}, {attention}"]
            speedup = seconds[f"Transformer, {attention}"] / mine
            rows.append({**row, "seconds": mine, "speedup": speedup})
    return Reproduction(
        rows,
        [
            Panel(
                f"{attention}, d = {width}, L = {layers}",
                "tokens",
                "seconds",
                lines(where(rows, attention=attention), "tokens", "seconds", by="model"),
                x_scale="log",
                y_scale="log",
            )
            for attention in ATTENTIONS
        ],
        got="TransJect over Transformer: "
        + "; ".join(_said(rows, attention) for attention in ATTENTIONS),
        holds=judge_table_4(
            [row["speedup"] for row in where(rows, attention=_PAPERS, model="TransJect")]
        ),
        criterion=Criterion("", uncertainty=f"medians of {repeats} interleaved passes"),
        notes=(
            (
                f"median of {repeats} interleaved passes without gradient, batch 1, float32, on"
                f" {device}; the paper prints neither batch nor device"
            ),
        ),
    )


def _run(model: Any, ids: torch.Tensor, attention: str) -> None:
    with torch.no_grad(), sdpa_kernel(ATTENTIONS[attention]):
        model(input_ids=ids)


def _said(rows: Sequence[Row], attention: str) -> str:
    mine = where(rows, attention=attention)
    gains = ", ".join(
        f"{row['speedup']:.1f}x at {row['tokens']}" for row in where(mine, model="TransJect")
    )
    slope, plain = (
        exponent(where(mine, model=name), "tokens", "seconds")
        for name in ("TransJect", "Transformer")
    )
    return f"{attention} attention {gains}, slope in log-log {slope:.2f} against {plain:.2f}"


def judge_table_4(gains: Sequence[float]) -> bool:
    """Say whether the factors grow and end near the printed 26."""
    return list(gains) == sorted(gains) and gains[-1] >= 20


def build_models(width: int, layers: int, experts: int, positions: int) -> dict[str, Any]:
    """Return the four models of the table, byte-level classifiers in evaluation mode with random
    weights."""
    shared: Any = {"hidden_size": width, "num_hidden_layers": layers, "vocab_size": _BYTES}
    shared |= {"num_labels": 2, "position": "sinusoidal", "max_position_embeddings": positions}
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "Transformer": ("wellposed", {}),
        "Transformer+ReZero": ("wellposed", {"norm": "none", "residual": "rezero"}),
        "Orthogonal Transformer": ("wellposed", {}),
        "TransJect": ("transject", {"num_experts": experts}),
    }
    models: dict[str, Any] = {}
    for name, (architecture, options) in kinds.items():
        torch.manual_seed(0)
        options |= {"num_attention_heads": 8} if architecture == "wellposed" else {}
        options |= shared
        models[name] = build_model(architecture, "sequence_classification", **options).eval()
    with torch.no_grad():
        for name, parameter in models["Orthogonal Transformer"].named_parameters():
            if name.endswith("_proj.weight"):
                parameter.copy_(polar(parameter))
    return models
