"""Huang et al. (2020): how deep an encoder-decoder trains without LayerNorm and warm-up, beside post-LN.

Both sides get the same batches, learning rate and schedule (inverse square root without warm-up). A run trains where
its validation loss ends below that of the unigram model, the best predictor that does not look at its input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellposed.charts import Panel, Series
from wellposed.recipes.huang2020.pairs import NOTE, translation_data
from wellposed.recipes.recipe import Reproduction, Request
from wellposed.recipes.variants import apply_variant
from wellposed.training.config import ModelOptions, RunConfig, TrainOptions

VARIANTS = ("t_fixup", "post_ln")
LABELS = {"t_fixup": "T-Fixup", "post_ln": "post-LN"}


@dataclass(frozen=True)
class Sizes:
    """What is trained at a scale."""

    depths: tuple[int, ...]
    steps: int
    seeds: int
    width: int = 32
    batch_size: int = 32
    pairs: int = 2000
    learning_rate: float = 1e-3


def sizes(request: Request) -> Sizes:
    """Return the sizes of the depth sweep at the request's scale."""
    return request.pick(
        toy=Sizes((1, 2), steps=4, seeds=1, width=8, batch_size=4, pairs=40),
        mini=Sizes((6, 20, 50, 100), steps=60, seeds=3),
        paper=Sizes((6, 12, 20, 50, 100, 150, 200), steps=2000, seeds=3, batch_size=64, pairs=20_000),
    )


def run_config(request: Request, chosen: Sizes, variant: str, depth: int, seed: int) -> RunConfig:
    """Return one run: ``depth`` encoder and ``depth`` decoder layers, no warm-up on either side."""
    base = RunConfig(
        task="translation",
        task_options={
            **translation_data(request, pairs=chosen.pairs),
            "tokenizer": "char" if request.data is None else "bpe",
            "vocab_size": 2000,
            "max_tokens": 16 if request.data is None else 128,
            "generate_beams": 1,
            "generate_max_examples": 4,
        },
        model=ModelOptions(
            hidden_size=chosen.width,
            num_hidden_layers=depth,
            num_attention_heads=4,
            intermediate_size=2 * chosen.width,
            activation="relu",
        ),
        train=TrainOptions(
            steps=chosen.steps,
            batch_size=chosen.batch_size,
            learning_rate=chosen.learning_rate,
            schedule="inverse_sqrt",
            weight_decay=1e-4,
            eval_every=chosen.steps,
            checkpoint_every=chosen.steps,
            log_every=max(1, chosen.steps // 20),
            seed=seed,
        ),
    )
    return apply_variant(variant, base)


@dataclass(frozen=True)
class Run:
    """One depth of one side with one seed."""

    variant: str
    depth: int
    seed: int
    valid: float
    """Nats per token; infinite where the loss stopped being finite."""
    unigram: float
    """Nats per token of the unigram model on valid."""
    curve: tuple[tuple[int, float], ...]
    """(step, training loss)."""
    error: str = ""

    @property
    def trains(self) -> bool:
        """Whether the loss ended below the unigram model's."""
        return self.valid < self.unigram


def train_depth(request: Request, chosen: Sizes, variant: str, depth: int, seed: int) -> Run:
    """Train one run, or go on with it, in the recipe's folder."""
    from wellposed.tasks import build_task
    from wellposed.training import read_metrics, train

    config = run_config(request, chosen, variant, depth, seed)
    task = build_task(config.task, config.task_options)
    folder = request.out / "runs" / f"huang2020-depth-{request.scale}" / f"{variant}-{depth}-seed{seed}"
    result = train(config, folder, resume="auto", progress=False, task=task)
    if result.status == "cancelled":
        raise KeyboardInterrupt
    found = result.result.get("results", {}).get(config.task, {})
    curve = [
        (int(row["step"]), float(row["loss"]))
        for row in read_metrics(Path(folder))
        if row["split"] == "train" and math.isfinite(float(row["loss"]))
    ]
    failed = result.status == "failed"
    return Run(
        variant,
        depth,
        seed,
        math.inf if failed else float(found["loss,valid"]),
        float(task.reference()["loss"]),
        tuple(curve),
        result.message if failed else "",
    )


def depth(request: Request) -> Reproduction:
    """Loss against depth with T-Fixup and with post-LN, neither with warm-up."""
    chosen = sizes(request)
    runs = []
    for layers in chosen.depths:
        for seed in range(chosen.seeds):
            for variant in VARIANTS:
                runs.append(train_depth(request, chosen, variant, layers, seed))
                request.announce(_line(runs[-1]))
    return summarise(request, chosen, runs)


def _line(run: Run) -> str:
    loss = f"{run.valid:.3f}" if math.isfinite(run.valid) else "not finite"
    return f"{LABELS[run.variant]}, {run.depth}+{run.depth} layers, seed {run.seed}: {loss} (unigram {run.unigram:.3f})"


def summarise(request: Request, chosen: Sizes, runs: Sequence[Run]) -> Reproduction:
    """Return rows, figure and verdict of finished runs."""
    rows: list[dict[str, Any]] = [
        {
            "variant": LABELS[run.variant], "layers_each_side": run.depth, "seed": run.seed, "valid_loss": run.valid,
            "unigram_loss": run.unigram, "trains": run.trains, "error": run.error,
        }
        for run in runs
    ]  # fmt: skip
    trained = {variant: _depths(runs, variant) for variant in VARIANTS}
    deepest = max(run.depth for run in runs)
    got = "; ".join(
        f"{LABELS[variant]} trains at {', '.join(map(str, trained[variant])) or 'no'} layers a side, loss at {deepest} "
        f"{_losses(runs, variant, deepest)}"
        for variant in VARIANTS
    )
    held = deepest in trained["t_fixup"] and not any(
        run.trains for run in runs if run.variant == "post_ln" and run.depth == deepest
    )
    return Reproduction(
        rows,
        [_depth_panel(runs), *(_curve_panel(runs, variant) for variant in VARIANTS)],
        got=f"{got}; unigram model {runs[0].unigram:.3f}; width {chosen.width}, {chosen.steps} steps, "
        f"{chosen.seeds} seeds",
        holds=None if request.scale == "toy" else held,
        notes=(
            "a depth trains where every seed's loss on valid ends below the unigram model's; no warm-up on either side",
            *((NOTE,) if request.data is None else ()),
        ),
    )


def _depths(runs: Sequence[Run], variant: str) -> list[int]:
    mine = [run for run in runs if run.variant == variant]
    depths = dict.fromkeys(run.depth for run in mine)
    return [layers for layers in depths if all(run.trains for run in mine if run.depth == layers)]


def _losses(runs: Sequence[Run], variant: str, layers: int) -> str:
    losses = [run.valid for run in runs if run.variant == variant and run.depth == layers]
    return ", ".join(f"{loss:.3f}" if math.isfinite(loss) else "not finite" for loss in losses)


def _depth_panel(runs: Sequence[Run]) -> Panel:
    depths = sorted({run.depth for run in runs})
    ceiling = 2 * runs[0].unigram
    series = []
    for variant in VARIANTS:
        mine = [(run.depth, min(run.valid, ceiling)) for run in runs if run.variant == variant]
        series.append(Series(LABELS[variant], [x for x, _ in mine], [y for _, y in mine], "dots"))
    series.append(Series("unigram model", depths, [runs[0].unigram] * len(depths), "dashed"))
    return Panel("loss by depth, no warm-up", "layers each side", "nats per token on valid", series, x_scale="log")


def _curve_panel(runs: Sequence[Run], variant: str) -> Panel:
    series = [
        Series(f"{run.depth} layers", [step for step, _ in run.curve], [loss for _, loss in run.curve])
        for run in runs
        if run.variant == variant and run.seed == 0
    ]
    return Panel(LABELS[variant], "step", "training loss", series)
