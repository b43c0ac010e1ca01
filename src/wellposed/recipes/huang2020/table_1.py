"""Huang et al. (2020), appendix D, Table 1: the five settings, T-Fixup without warm-up beside post-LN with it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from wellposed.charts import Panel, Series
from wellposed.errors import ConfigError, listed
from wellposed.recipes.corpora import HUANG, SIZES, Corpus
from wellposed.recipes.huang2020.pairs import NOTE, translation_data
from wellposed.recipes.recipe import Reproduction, Request
from wellposed.recipes.variants import apply_variant
from wellposed.training.config import RunConfig

VARIANTS = {"t_fixup": "T-Fixup", "post_ln_warmup": "post-LN with warm-up"}
_RATE = 6.0
"""Tiny models take larger steps: the printed rates are of widths 512 and 1024, times this at width 32."""


def table_1(request: Request) -> Reproduction:
    """Every setting of the table trained with T-Fixup and with its baseline."""
    if request.scale == "paper":
        _refuse_missing(request)
    rows: list[dict[str, Any]] = []
    for corpus in HUANG:
        for variant, label in VARIANTS.items():
            request.announce(f"{corpus.pair}, {label}")
            rows.append(_run(request, corpus, variant))
    fixed = [row for row in rows if row["variant"] == "T-Fixup"]
    trained = [row["setting"] for row in fixed if row["valid_loss"] < row["unigram_loss"]]
    pairs = ", ".join(
        f"{row['setting']} {row['valid_loss']:.3f} ({other['valid_loss']:.3f})"
        for row, other in zip(fixed, rows[1::2], strict=True)
    )
    return Reproduction(
        rows,
        [
            Panel(
                "loss on valid by setting",
                "setting",
                "nats per token",
                [Series(label, range(len(HUANG)), _losses(rows, label), "dots") for label in VARIANTS.values()],
            )
        ],
        got=f"loss of T-Fixup without warm-up (post-LN with warm-up): {pairs}; unigram {rows[0]['unigram_loss']:.3f}; "
        f"{len(trained)} of {len(HUANG)} settings train",
        holds=None if request.scale == "toy" else len(trained) == len(HUANG),
        notes=(
            "the text at hand holds the paper's appendix alone: settings are printed, BLEU is not",
            "not printed and taken: " + "; ".join(f"{corpus.pair}: {corpus.not_printed}" for corpus in HUANG[:4]),
            *((f"mini: width 32, rates times {_RATE:g}",) if request.scale != "paper" else ()),
            *((NOTE,) if request.data is None else ()),
        ),
    )


def _losses(rows: list[dict[str, Any]], label: str) -> list[float]:
    return [row["valid_loss"] for row in rows if row["variant"] == label]


def _refuse_missing(request: Request) -> None:
    needed = [corpus for corpus in HUANG if corpus.data is None]
    root = Path(request.data or ".")
    missing = [corpus.name for corpus in needed if request.data is None or not (root / corpus.name).is_dir()]
    if missing:
        raise ConfigError("give --data FOLDER with these folders of aligned files in it:\n" + listed(missing))


def run_config(request: Request, corpus: Corpus, variant: str) -> RunConfig:
    """Return the run of one setting; below paper scale its rate, decay and dropout on a tiny model."""
    paper = corpus.run_config()
    if request.scale == "paper":
        options = dict(paper.task_options)
        options |= {} if corpus.data is not None else {"data": str(Path(request.data or ".") / corpus.name)}
        return apply_variant(variant, replace(paper, task_options=options))
    steps = request.pick(toy=3, mini=150, paper=0)
    options = translation_data(
        request, wanted=(corpus.src, corpus.tgt), words=True, pairs=request.pick(toy=60, mini=3000, paper=0)
    )
    options |= {"vocab_size": 2000, "max_tokens": 128, "overflow": "drop", "limit_pairs": 6000}
    options |= {"generate_beams": 1, "generate_max_examples": request.pick(toy=4, mini=200, paper=0)}
    model = replace(
        paper.model,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_hidden_layers=1 if request.scale == "toy" else max(1, SIZES[corpus.size].layers // 3),
        # A twentieth of the paper's regularisation: a model that sees its data once has nothing to overfit.
        dropout=paper.model.dropout / 20,
    )
    train = replace(
        paper.train, steps=steps, batch_size=request.pick(toy=4, mini=32, paper=0), gradient_accumulation=1,
        learning_rate=_RATE * paper.train.learning_rate, eval_every=steps, checkpoint_every=steps, log_every=10,
        average_checkpoints=0, precision="fp32",
    )  # fmt: skip
    return apply_variant(variant, replace(paper, task_options=options, model=model, train=train))


def _run(request: Request, corpus: Corpus, variant: str) -> dict[str, Any]:
    from wellposed.tasks import build_task
    from wellposed.training import train

    config = run_config(request, corpus, variant)
    task = build_task(config.task, config.task_options)
    folder = request.out / "runs" / f"huang2020-table-1-{request.scale}" / f"{corpus.name}-{variant}"
    result = train(config, folder, resume="auto", progress=False, task=task)
    if result.status == "cancelled":
        raise KeyboardInterrupt
    found = result.result.get("results", {}).get(config.task, {})
    failed = result.status == "failed"
    return {
        "setting": corpus.pair,
        "variant": VARIANTS[variant],
        "learning_rate_printed": corpus.learning_rate,
        "learning_rate": config.train.learning_rate,
        "decay_steps": config.train.decay_steps,
        "dropout_printed": corpus.dropout,
        "dropout": config.model.dropout,
        "tokens_per_batch_printed": corpus.tokens_per_batch * corpus.accumulation,
        "max_updates_printed": corpus.steps,
        "mixed_precision_printed": corpus.bf16,
        "steps": config.train.steps,
        "valid_loss": math.inf if failed else float(found["loss,valid"]),
        "unigram_loss": float(task.reference()["loss"]),
        "bleu_test": None if failed else found.get("bleu,test"),
    }
