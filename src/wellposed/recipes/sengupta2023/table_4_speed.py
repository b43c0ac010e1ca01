"""Sengupta et al. (2023), table 4: inference time against the length of the text."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from wellposed.charts import Panel, Row, lines, where
from wellposed.linalg import polar
from wellposed.models import build_model
from wellposed.recipes.recipe import Criterion, Reproduction, Request
from wellposed.recipes.timing import median_seconds, timing_device

PAPER = {
    "Transformer": (1.0, 1.0, 1.0, 1.0),
    "Transformer+ReZero": (1.0, 1.0, 1.0, 1.1),
    "Orthogonal Transformer": (1.0, 1.0, 1.1, 1.4),
    "TransJect": (5.0, 9.6, 12.8, 26.3),
}
_LENGTHS = (1024, 2048, 3072, 4096)
_BYTES = 258


def table_4(request: Request) -> Reproduction:
    """Speed of each model over the Transformer's at 1k, 2k, 3k and 4k tokens."""
    width, layers, experts, lengths, repeats = request.pick(
        toy=(16, 1, 2, (16, 32), 2),
        mini=(256, 2, 4, _LENGTHS, 3),
        medium=(512, 6, 4, _LENGTHS, 7),
        paper=(512, 6, 4, _LENGTHS, 20),
    )
    device = timing_device()
    models = {name: model.to(device) for name, model in build_models(width, layers, experts, max(lengths)).items()}
    rows: list[dict[str, Any]] = []
    for column, tokens in enumerate(lengths):
        request.announce(f"{tokens} tokens")
        ids = torch.randint(2, _BYTES, (1, tokens), device=device)
        with torch.no_grad():
            calls = {name: functools.partial(model, input_ids=ids) for name, model in models.items()}
            seconds = median_seconds(calls, repeats, warmup=1)
        rows += [
            {
                "model": name,
                "tokens": tokens,
                **({"paper_speedup": PAPER[name][column]} if lengths == _LENGTHS else {}),
                "seconds": seconds[name],
                "speedup": seconds["Transformer"] / seconds[name],
            }
            for name in models
        ]
    gains = [row["speedup"] for row in where(rows, model="TransJect")]
    slope, plain = (_slope(where(rows, model=name)) for name in ("TransJect", "Transformer"))
    series = lines(rows, "tokens", "seconds", by="model")
    return Reproduction(
        rows,
        [Panel(f"inference, d = {width}, L = {layers}", "tokens", "seconds", series, x_scale="log", y_scale="log")],
        got="TransJect over Transformer: "
        + ", ".join(f"{gain:.1f}x at {tokens}" for gain, tokens in zip(gains, lengths, strict=True))
        + f"; slope in log-log {slope:.2f} against {plain:.2f}",
        holds=judge_table_4(gains),
        criterion=Criterion(
            "TransJect is faster by a factor that grows with the length, to at least 20 at 4k tokens",
            uncertainty=f"medians of {repeats} interleaved passes",
        ),
        notes=(
            f"median of {repeats} interleaved passes without gradient, batch 1, float32, on {device}; the paper prints "
            "neither batch nor device",
            "our Transformer runs fused attention, which the paper's time did not have",
        ),
    )


def judge_table_4(gains: Sequence[float]) -> bool:
    """Say whether the factors grow and end near the printed 26."""
    return list(gains) == sorted(gains) and gains[-1] >= 20


def build_models(width: int, layers: int, experts: int, positions: int) -> dict[str, Any]:
    """Return the four models of the table, byte-level classifiers in evaluation mode with random weights."""
    shared = {"vocab_size": _BYTES, "hidden_size": width, "num_hidden_layers": layers, "num_labels": 2}
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "Transformer": ("wellposed", {"num_attention_heads": 8}),
        "Transformer+ReZero": ("wellposed", {"num_attention_heads": 8, "norm": "none", "residual": "rezero"}),
        "Orthogonal Transformer": ("wellposed", {"num_attention_heads": 8}),
        "TransJect": ("transject", {"num_experts": experts}),
    }
    models: dict[str, Any] = {}
    for name, (architecture, options) in kinds.items():
        torch.manual_seed(0)
        options |= {**shared, "position": "sinusoidal", "max_position_embeddings": positions}
        models[name] = build_model(architecture, "sequence_classification", **options).eval()
    with torch.no_grad():
        for name, parameter in models["Orthogonal Transformer"].named_parameters():
            if name.endswith("_proj.weight"):
                parameter.copy_(polar(parameter))
    return models


def _slope(rows: Sequence[Row]) -> float:
    """Return the least-squares slope of seconds over tokens in log-log."""
    x, y = ([math.log(row[name]) for row in rows] for name in ("tokens", "seconds"))
    return statistics.linear_regression(x, y).slope
