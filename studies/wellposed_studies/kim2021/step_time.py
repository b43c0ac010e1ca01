"""Kim et al. (2021), table 1: the time of a training step of each attention by depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from wellposed.charts import Panel, Row, lines, where
from wellposed.models import build_model
from wellposed.recipes.recipe import Criterion, Reproduction, Request, recipe
from wellposed_studies.kim2021.language_models import LABELS
from wellposed_studies.timing import median_seconds, timing_device

KINDS = ("dot_product", "l2", "l2_tied", "l2_contractive")
# Characters of the train split of the character-level Penn Treebank.
_PTB_CHARACTERS = 5_017_483


@recipe("kim2021/table-1", measured={"mini": 0.4}, estimated={"medium": 10, "paper": 5})
def table_1(request: Request) -> Reproduction:
    """Time of a training step by attention and depth.

    Claim: the differences are rather small: at 5 layers 110 s (dot product), 115, 108 (tied),
    127 (contractive) an epoch

    Test: no attention takes more than 1.5 times the step of dot product, at any depth
    """
    width, tokens, batch, depths, repeats = request.pick(
        toy=(16, 8, 2, [1], 2),
        mini=(128, 128, 16, [1, 3, 5], 7),
        medium=(256, 288, 16, [1, 2, 3, 4, 5], 11),
        paper=(512, 288, 64, [1, 2, 3, 4, 5], 20),
    )
    steps_per_epoch = _PTB_CHARACTERS / (tokens * batch)
    rows: list[dict[str, Any]] = []
    for depth in depths:
        request.announce(f"{depth} layers")
        steps = {kind: training_step(kind, width, tokens, batch, depth) for kind in KINDS}
        seconds = median_seconds(steps, repeats, warmup=2)
        rows += [
            {
                "attention": LABELS[kind],
                "layers": depth,
                "step_seconds": seconds[kind],
                "epoch_seconds": seconds[kind] * steps_per_epoch,
                "over_dot_product": seconds[kind] / seconds["dot_product"],
            }
            for kind in KINDS
        ]
    worst = max(rows, key=lambda row: row["over_dot_product"])
    series = lines(rows, "layers", "step_seconds", by="attention")
    return Reproduction(
        rows,
        [Panel(f"training step, D = {width}, N = {tokens}", "layers", "seconds", series)],
        got=f"at {depths[-1]} layers, over dot product: "
        + ", ".join(
            f"{row['attention']} {row['over_dot_product']:.2f}"
            for row in where(rows, layers=depths[-1])[1:]
        )
        + f"; largest {worst['over_dot_product']:.2f} ({worst['attention']}, {worst['layers']}"
        " layers)",
        holds=judge_table_1(rows),
        criterion=Criterion("", uncertainty=f"medians of {repeats} interleaved steps"),
        notes=(
            (
                f"median of {repeats} interleaved steps of batch {batch} on {timing_device()}; an"
                f" epoch is {steps_per_epoch:.0f} steps; timings on a busy machine scatter"
            ),
        ),
    )


def judge_table_1(rows: Sequence[Row]) -> bool:
    """Say whether the differences are small at every depth."""
    return max(row["over_dot_product"] for row in rows) <= 1.5


def training_step(kind: str, width: int, tokens: int, batch: int, depth: int) -> Callable[[], None]:
    """Return one step of AdamW, forward and backward pass included, of a model with that
    attention."""
    device = timing_device()
    ids = torch.randint(0, 50, (batch, tokens), device=device)
    # Divided by the bound of the inf-norm, as in the paper.
    options: dict[str, Any] = {"lipschitz_norm": "inf"} if kind == "l2_contractive" else {}
    sizes = {"hidden_size": width, "num_hidden_layers": depth, "max_position_embeddings": tokens}
    torch.manual_seed(0)
    model: Any = build_model(
        "wellposed",
        "causal_lm",
        vocab_size=50,
        num_attention_heads=8,
        attention=kind,
        **sizes,
        **options,
    )
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    return step
