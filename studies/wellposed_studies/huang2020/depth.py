"""Huang et al. (2020): how deep an encoder-decoder trains without LayerNorm and warm-up, beside
post-LN.

Both sides get the same batches and schedule (inverse square root without warm-up). At every depth
each side tries the same three rates with the first seed, and the one with the least loss on valid
is its rate for the others. A run trains where its loss on valid ends below that of the unigram
model, the best predictor that does not look at its input.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from wellposed.charts import Panel, Row, lines
from wellposed.compare.variants import apply_variant
from wellposed.recipes.recipe import Criterion, Reproduction, Request
from wellposed.training.config import ModelOptions, RunConfig, TrainOptions
from wellposed_studies.corpora import translation_data
from wellposed_studies.frontier.tuning import tune
from wellposed_studies.runs import FinishedRun, PlannedRun, curves, depths_trained, train_grid
from wellposed_studies.verdicts import AGREED

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
    learning_rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3)


def depth(request: Request) -> Reproduction:
    """Loss against depth with T-Fixup and with post-LN, neither with warm-up."""
    sizes = sizes_of(request)
    return summarise(sizes, train_depths(request, sizes))


def sizes_of(request: Request) -> Sizes:
    """Return what is trained."""
    return request.pick(
        toy=Sizes((1, 2), steps=4, seeds=1, width=8, batch_size=4, pairs=40),
        mini=Sizes((6, 20, 50, 100), steps=60, seeds=3),
        medium=Sizes((6, 20, 50, 100), steps=300, seeds=5, width=48, pairs=10_000),
        paper=Sizes(
            (6, 12, 20, 50, 100, 150, 200), steps=2000, seeds=3, batch_size=64, pairs=20_000
        ),
    )


def train_depths(request: Request, sizes: Sizes) -> list[FinishedRun]:
    """Train every depth, T-Fixup and post-LN on the same batches: the first seed at every rate, all
    at the best."""
    from wellposed.tasks import build_task

    base = _base_config(request, sizes)
    task = build_task(base.task, base.task_options)

    def plan(variant: str, layers: int, rate: float, seed: int) -> PlannedRun:
        train = replace(base.train, seed=seed, learning_rate=rate)
        config = apply_variant(
            variant, replace(base, model=replace(base.model, num_hidden_layers=layers), train=train)
        )
        folder = request.runs("huang2020-depth") / f"{variant}-{layers}-rate{rate:g}-seed{seed}"
        label = f"{LABELS[variant]}, {layers}+{layers} layers, rate {rate:g}, seed {seed}"
        return PlannedRun(folder, label, config)

    found: list[FinishedRun] = []
    for layers, variant in itertools.product(sizes.depths, LABELS):
        found += tune(
            lambda planned: train_grid(request, planned, task=task),
            partial(plan, variant, layers),
            sizes.learning_rates,
            sizes.seeds,
            score=lambda run: -_loss(run),
        ).runs
    return found


def _base_config(request: Request, sizes: Sizes) -> RunConfig:
    generated = request.data is None
    return RunConfig(
        task="translation",
        task_options={
            **translation_data(request, pairs=sizes.pairs),
            "tokenizer": "char" if generated else "bpe",
            "vocab_size": 2000,
            "max_tokens": 16 if generated else 128,
            "generate_beams": 1,
            "generate_max_examples": 4,
        },
        model=ModelOptions(
            hidden_size=sizes.width,
            num_attention_heads=4,
            intermediate_size=2 * sizes.width,
            activation="relu",
        ),
        train=TrainOptions(
            steps=sizes.steps,
            batch_size=sizes.batch_size,
            schedule="inverse_sqrt",
            weight_decay=1e-4,
            eval_every=sizes.steps,
            checkpoint_every=sizes.steps,
            log_every=max(1, sizes.steps // 20),
        ),
    )


def summarise(sizes: Sizes, runs: Sequence[FinishedRun]) -> Reproduction:
    """Return rows, figure and verdict of finished runs."""
    unigram = runs[0].reference["loss"]

    def trains(run: FinishedRun) -> bool:
        return _loss(run) < unigram

    rows = [
        {
            "variant": LABELS[run.variant],
            "layers_each_side": run.depth,
            "seed": run.seed,
            "learning_rate": run.config.train.learning_rate,
            "valid_loss": _loss(run),
            "unigram_loss": unigram,
            "trains": trains(run),
            "error": run.failure,
        }
        for run in runs
    ]
    deepest = max(run.depth for run in runs)
    by_variant = {variant: [run for run in runs if run.variant == variant] for variant in LABELS}
    trained = {variant: depths_trained(mine, trains) for variant, mine in by_variant.items()}
    said = []
    for variant, mine in by_variant.items():
        losses = [_loss(run) for run in mine if run.depth == deepest]
        said.append(
            f"{LABELS[variant]} trains at {', '.join(map(str, trained[variant])) or 'no'} layers a"
            f" side, loss at {deepest} "
            + ", ".join(f"{loss:.3f}" if math.isfinite(loss) else "not finite" for loss in losses)
        )
    return Reproduction(
        rows,
        [_depth_panel(rows, unigram), *(_curve_panel(mine) for mine in by_variant.values())],
        got=(
            f"{'; '.join(said)}; unigram model {unigram:.3f}; width {sizes.width}, {sizes.steps}"
            f" steps, {sizes.seeds} seeds"
        ),
        holds=judge_depth(
            *(
                [trains(run) for run in by_variant[variant] if run.depth == deepest]
                for variant in ("t_fixup", "post_ln")
            )
        ),
        notes=(
            (
                "no warm-up on either side; at every depth each side at its best of the rates"
                f" {', '.join(f'{rate:g}' for rate in sizes.learning_rates)} by the loss on valid"
                " of the first seed"
            ),
        ),
        criterion=Criterion(
            "at the greatest depth tried every seed of T-Fixup ends with a loss on valid below the"
            " unigram model's, and no seed of post-LN does",
            seeds=sizes.seeds,
            uncertainty=AGREED,
        ),
    )


def judge_depth(t_fixup: Sequence[bool], post_ln: Sequence[bool]) -> bool:
    """Say whether at the greatest depth every seed of T-Fixup trains and none of post-LN does."""
    return all(t_fixup) and not any(post_ln)


def _loss(run: FinishedRun) -> float:
    """Return nats per token on valid; infinite where training diverged."""
    return run.metric("loss,valid", math.inf)


def _depth_panel(rows: Sequence[Row], unigram: float) -> Panel:
    cut = [{**row, "valid_loss": min(row["valid_loss"], 2 * unigram)} for row in rows]
    depths = sorted({row["layers_each_side"] for row in rows})
    dots = lines(cut, "layers_each_side", "valid_loss", by="variant", style="dots")
    series = [replace(each, colour=len(depths) + number) for number, each in enumerate(dots)]
    return Panel(
        "loss by depth, no warm-up",
        "layers each side",
        "nats per token on valid",
        series,
        x_scale="log",
        level=("unigram model", unigram),
    )


def _curve_panel(runs: Sequence[FinishedRun]) -> Panel:
    first_seed = curves(
        [run for run in runs if run.seed == 0], "train", lambda run: f"{run.depth} layers"
    )
    return Panel(LABELS[runs[0].variant], "step", "training loss", first_seed)
