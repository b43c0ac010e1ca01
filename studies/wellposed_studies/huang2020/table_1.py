"""Huang et al. (2020), appendix D, Table 1: the five settings, T-Fixup without warm-up beside
post-LN with it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from wellposed.charts import Panel, Row, Series, where
from wellposed.compare.variants import apply_variant
from wellposed.recipes.recipe import Criterion, Reproduction, Request
from wellposed.training.config import RunConfig
from wellposed_studies.corpora import HUANG, SIZES, Corpus, paper_runs, small_corpus
from wellposed_studies.runs import PlannedRun, mean_and_error, spanned, train_grid
from wellposed_studies.verdicts import AGREED, agreed

VARIANTS = {"t_fixup": "T-Fixup", "post_ln_warmup": "post-LN with warm-up"}
_RATE = 6.0
"""Small models take larger steps: the printed rates are of widths 512 and 1024, times this below
paper scale."""


def table_1(request: Request) -> Reproduction:
    """Every setting of the table trained with T-Fixup and with its baseline."""
    if request.scale == "paper":
        configs = paper_runs(request, HUANG)
    else:
        configs = [_small_run(request, corpus) for corpus in HUANG]
    seeds = range(seeds_of(request))
    planned = [
        PlannedRun(
            request.runs("huang2020-table-1") / f"{corpus.name}-{variant}-seed{seed}",
            f"{corpus.pair}, {VARIANTS[variant]}, seed {seed}",
            apply_variant(variant, replace(config, train=replace(config.train, seed=seed))),
        )
        for (corpus, config), variant, seed in itertools.product(
            zip(HUANG, configs, strict=True), VARIANTS, seeds
        )
    ]
    rows = [
        {
            "setting": corpus.pair,
            "variant": VARIANTS[run.variant],
            "seed": run.seed,
            "learning_rate_printed": corpus.learning_rate,
            "learning_rate": run.config.train.learning_rate,
            "decay_steps": run.config.train.decay_steps,
            "dropout_printed": corpus.dropout,
            "dropout": run.config.model.dropout,
            "tokens_per_batch_printed": corpus.tokens_per_batch * corpus.accumulation,
            "max_updates_printed": corpus.steps,
            "mixed_precision_printed": corpus.bf16,
            "steps": run.config.train.steps,
            "valid_loss": run.metric("loss,valid", math.inf),
            "unigram_loss": run.reference["loss"],
            "bleu_test": run.metrics.get("bleu,test"),
        }
        for (corpus, *_), run in zip(
            itertools.product(HUANG, VARIANTS, seeds), train_grid(request, planned), strict=True
        )
    ]
    losses = {
        label: [
            [row["valid_loss"] for row in where(rows, variant=label, setting=corpus.pair)]
            for corpus in HUANG
        ]
        for label in VARIANTS.values()
    }
    pairs = ", ".join(
        f"{corpus.pair} {spanned(ours)} ({spanned(baseline)})"
        for corpus, ours, baseline in zip(HUANG, *losses.values(), strict=True)
    )
    found = {
        label: [mean_and_error(of_seeds) for of_seeds in settings]
        for label, settings in losses.items()
    }
    series = [
        Series(
            label,
            range(len(HUANG)),
            [mean for mean, _ in ends],
            "dots",
            errors=[error for _, error in ends],
        )
        for label, ends in found.items()
    ]
    ours = where(rows, variant=VARIANTS["t_fixup"])
    return Reproduction(
        rows,
        [
            Panel(
                "loss on valid by setting",
                "",
                "nats per token",
                series,
                names=[corpus.pair for corpus in HUANG],
                level=("unigram model", rows[0]["unigram_loss"]),
            )
        ],
        got=(
            f"loss of T-Fixup without warm-up (post-LN with warm-up): {pairs}; unigram"
            f" {rows[0]['unigram_loss']:.3f}; {sum(map(_trains, ours))} of {len(ours)} trainings of"
            " T-Fixup end below it"
        ),
        holds=agreed([judge_table_1(where(ours, seed=seed)) for seed in seeds]),
        criterion=Criterion(
            "T-Fixup without warm-up ends below the unigram model's loss on valid in every setting",
            seeds=len(seeds),
            uncertainty=AGREED,
        ),
        notes=(
            "the text at hand holds the paper's appendix alone: settings are printed, BLEU is not",
            "not printed and taken: "
            + "; ".join(f"{corpus.pair}: {corpus.not_printed}" for corpus in HUANG[:4]),
            *((f"small models, rates times {_RATE:g}",) if request.scale != "paper" else ()),
        ),
    )


def seeds_of(request: Request) -> int:
    """Return the trainings of each setting."""
    return request.pick(toy=1, mini=3, medium=3, paper=3)


def judge_table_1(rows: Sequence[Row]) -> bool:
    """Say whether every setting trains."""
    return all(map(_trains, rows))


def _trains(row: Row) -> bool:
    return row["valid_loss"] < row["unigram_loss"]


def _small_run(request: Request, corpus: Corpus) -> RunConfig:
    """Return a setting below paper scale: its rate, decay and dropout on a tiny model."""
    paper = corpus.run_config()
    steps = request.pick(toy=3, mini=150, medium=1500, paper=0)
    width = request.pick(toy=32, mini=32, medium=128, paper=0)
    model = replace(
        paper.model,
        hidden_size=width,
        intermediate_size=2 * width,
        num_attention_heads=4,
        num_hidden_layers=1 if request.scale == "toy" else max(1, SIZES[corpus.size].layers // 3),
        # A twentieth of the paper's regularisation: a model that sees its data once has nothing to
        # overfit.
        dropout=paper.model.dropout / 20,
    )
    train = replace(
        paper.train,
        steps=steps,
        batch_size=request.pick(toy=4, mini=32, medium=64, paper=0),
        gradient_accumulation=1,
        learning_rate=_RATE * paper.train.learning_rate,
        eval_every=steps,
        checkpoint_every=steps,
        log_every=10,
        average_checkpoints=0,
        precision="fp32",
    )
    options = small_corpus(request, max_tokens=128, wanted=(corpus.src, corpus.tgt))
    return replace(paper, task_options=options, model=model, train=train)
