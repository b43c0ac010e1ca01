"""Kim et al. (2021), table 1: the time of a training step of each attention by depth."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from wellposed.charts import Panel, Series
from wellposed.models import build_model
from wellposed.recipes.recipe import Reproduction, Request

KINDS = {
    "dot_product": "dot product",
    "l2": "L2",
    "l2_tied": "tied L2",
    "l2_contractive": "contractive L2",
}
# Characters of the train split of the character-level Penn Treebank.
_PTB_CHARACTERS = 5_017_483


def table_1(request: Request) -> Reproduction:
    """Seconds of one training step, and of one epoch of the Penn Treebank at that speed."""
    width, tokens, batch = request.pick(toy=(16, 8, 2), mini=(128, 128, 16), paper=(512, 288, 64))
    depths, repeats = request.pick(toy=([1], 2), mini=([1, 3, 5], 7), paper=([1, 2, 3, 4, 5], 20))
    steps_per_epoch = _PTB_CHARACTERS / (tokens * batch)
    rows: list[dict[str, Any]] = []
    for depth in depths:
        request.announce(f"{depth} layers")
        seconds = step_seconds(width, tokens, batch, depth, repeats)
        rows += [
            {
                "attention": name,
                "layers": depth,
                "step_seconds": seconds[kind],
                "epoch_seconds": seconds[kind] * steps_per_epoch,
                "over_dot_product": seconds[kind] / seconds["dot_product"],
            }
            for kind, name in KINDS.items()
        ]
    worst = max(rows, key=lambda row: row["over_dot_product"])
    last = {row["attention"]: row["over_dot_product"] for row in rows if row["layers"] == depths[-1]}
    return Reproduction(
        rows,
        [
            Panel(
                f"training step, D = {width}, N = {tokens}",
                "layers",
                "seconds",
                [
                    Series(name, depths, [row["step_seconds"] for row in rows if row["attention"] == name])
                    for name in KINDS.values()
                ],
            )
        ],
        got=f"at {depths[-1]} layers, over dot product: "
        + ", ".join(f"{name} {value:.2f}" for name, value in last.items() if name != "dot product")
        + f"; largest {worst['over_dot_product']:.2f} ({worst['attention']}, {worst['layers']} layers)",
        holds=None if request.scale == "toy" else worst["over_dot_product"] <= 1.5,
        notes=(
            f"median of {repeats} interleaved steps of batch {batch} on {_device()}; an epoch is "
            f"{steps_per_epoch:.0f} steps; timings on a busy machine scatter",
        ),
    )


def step_seconds(width: int, tokens: int, batch: int, depth: int, repeats: int) -> dict[str, float]:
    """Median time of forward, backward and AdamW of each attention; the attentions take turns."""
    device = _device()
    ids = torch.randint(0, 50, (batch, tokens), device=device)
    runs = {}
    for kind in KINDS:
        torch.manual_seed(0)
        # Divided by the bound of the inf-norm, as in the paper.
        norm = {"lipschitz_norm": "inf"} if kind == "l2_contractive" else {}
        model: Any = build_model(
            "wellposed", "causal_lm", vocab_size=50, hidden_size=width, num_hidden_layers=depth,
            num_attention_heads=8, attention=kind, max_position_embeddings=tokens, **norm,
        )  # fmt: skip
        model.to(device)
        runs[kind] = (model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(repeats + 2):
        for kind, (model, optimizer) in runs.items():
            started = time.perf_counter()
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()
            times[kind].append(time.perf_counter() - started)
    return {kind: statistics.median(values[2:]) for kind, values in times.items()}


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
