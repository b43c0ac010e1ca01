"""Sengupta et al. (2023): the runs behind tables 1 to 3 and the figures, trained once and shared;
free of torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wellposed.compare.variants import apply_variant, variant_folder
from wellposed.errors import ConfigError, DataError
from wellposed.recipes.recipe import Request
from wellposed.training.config import ModelOptions, RunConfig, TrainOptions
from wellposed_studies.frontier.tuning import best_tried, rates_about, try_rates
from wellposed_studies.runs import FinishedRun, PlannedRun, train_grid

LABELS = {
    "post_ln": "Transformer",
    "rezero": "Transformer+ReZero",
    "orthogonal": "Orthogonal Transformer",
    "transject": "TransJect",
    "transject_random": "Random-TransJect",
}
VARIANTS = tuple(LABELS)
SCALE_NOTE = (
    'the paper prints no scale of the embeddings: the verdict is on models without one; "scaled"'
    " multiplies them by sqrt(D), as ours do by default"
)
TUNING_SEED = 1000
PAPER_WIDTH = 512
PAPER_HEADS = 8
"""Not printed; 8 as in Vaswani et al. (2017)."""


@dataclass(frozen=True)
class Sizes:
    """What is trained on one task at a scale."""

    width: int
    layers: int
    batch_size: int
    steps: int
    learning_rate: float
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the task."""
    experts: int = 4
    heads: int = PAPER_HEADS
    pooling: Any = "mean"
    seeds: int = 3
    warmup: int = 0
    schedule: Any = "constant"
    patience: int | None = None
    evaluations: int = 10
    eval_batches: int | None = None
    clip: float = 5.0
    dropout: float = 0.0
    rates: Mapping[str, float] = field(default_factory=dict)
    """Learning rates of variants that do not take `learning_rate`."""
    factors: Sequence[float] = ()
    """Every variant tries its rate times these and takes the best on valid, further ones where that
    is the first or the last; its rate as it is where empty."""


@dataclass(frozen=True)
class Study:
    """One column of a table: a task, where its data is looked for, and its sizes."""

    name: str
    """Short name, for folders and rows."""
    task: str
    sizes: Sizes
    folders: tuple[str, ...] = ()
    """Names of the data set's folder inside the folder given as data; empty where the builtin
    source is wanted."""
    needs_data: bool = True
    """Whether there is no builtin source."""
    scale_embeddings: bool = True
    """Whether Transformers multiply embeddings by sqrt(D), as is common; the paper prints no
    scale."""

    def group(self, variant: str) -> str:
        """Return the name of the folder of a variant's runs; TransJect has no such scale."""
        unscaled = not self.scale_embeddings and not variant.startswith("transject")
        return f"sengupta2023-{self.name}{'-unscaled' if unscaled else ''}"

    def options(self, request: Request) -> dict[str, Any]:
        """Return the options of the task, with its data."""
        found = find_data(request.data, self.folders)
        if found is None and self.needs_data:
            raise ConfigError(
                f"the study {self.name!r} needs data: give data=FOLDER that holds"
                f" {' or '.join(self.folders)} (label and text in tsv, csv or jsonl files), or that"
                " is this folder itself"
            )
        return {**self.sizes.options, **({} if found is None else {"data": found})}


_ONE_RATE = "-one-rate"


def at_one_rate(study: Study) -> Study:
    """Return the study with the same rate for every variant."""
    return replace(
        study, name=f"{study.name}{_ONE_RATE}", sizes=replace(study.sizes, rates={}, factors=())
    )


def base_name(name: str) -> str:
    """Return the name of a study without what `at_one_rate` adds."""
    return name.removesuffix(_ONE_RATE)


def find_data(data: str | None, folders: Sequence[str]) -> str | None:
    """Return ``data/<one of folders>`` where it exists, ``data`` itself where its name is one, else
    None.

    Raises:
        DataError: ``data`` does not exist.
    """
    if data is None:
        return None
    if data.startswith("hf:"):
        return data if folders else None
    root = Path(data)
    if not root.exists():
        raise DataError(
            f"{root}: no such file or folder; give a folder that holds {', '.join(folders)}"
        )
    for name in folders:
        if (root / name).exists():
            return str(root / name)
        if name in (root.name, root.parent.name):
            return str(root)
    return None


def refuse_other_data(data: str | None, studies: Sequence[Study]) -> None:
    """Raise `DataError` where data is given and none of the studies, which have builtin sources,
    would read it."""
    if data is not None and not any(find_data(data, study.folders) for study in studies):
        wanted = ", ".join(folder for study in studies for folder in study.folders)
        raise DataError(
            f"{data}: is none of {wanted} and holds none; give one, or leave --data out"
        )


def run_config(study: Study, options: Mapping[str, Any], variant: str, seed: int) -> RunConfig:
    """Return the run of one variant: Adam (0.9, 0.98), the paper's, and the sizes of the study."""
    sizes = study.sizes
    base = RunConfig(
        task=study.task,
        task_options=dict(options),
        model=ModelOptions(
            hidden_size=sizes.width,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_experts=sizes.experts,
            position="sinusoidal",
            pooling=sizes.pooling,
            tie_word_embeddings=False,
            dropout=sizes.dropout,
            scale_embeddings=study.scale_embeddings,
        ),
        train=TrainOptions(
            steps=sizes.steps,
            batch_size=sizes.batch_size,
            learning_rate=sizes.rates.get(variant, sizes.learning_rate),
            schedule=sizes.schedule,
            warmup_steps=sizes.warmup,
            weight_decay=0.0,
            max_grad_norm=sizes.clip,
            patience=sizes.patience,
            eval_every=max(1, sizes.steps // sizes.evaluations),
            eval_batches=sizes.eval_batches,
            checkpoint_every=sizes.steps,
            log_every=max(1, sizes.steps // 20),
            seed=seed,
        ),
    )
    config = apply_variant(variant, base)
    # Only TransJect has experts; an option that a model lacks has to stay at its default.
    experts = sizes.experts if config.model.architecture == "transject" else 1
    # A variant may bring a learning rate of its own; here it is the paper's, or that of the study.
    return replace(config, model=replace(config.model, num_experts=experts), train=base.train)


def train_study(
    request: Request,
    study: Study,
    *,
    variants: Sequence[str] = VARIANTS,
    seeds: Sequence[int] | None = None,
    task: Any = None,
) -> tuple[Any, list[FinishedRun]]:
    """Train the variants of a study, every seed on the same batches; finished runs are kept for the
    next recipe.

    Returns:
        The task, and the runs, seed by seed.
    """
    from wellposed.tasks import build_task

    options = study.options(request)
    task = build_task(study.task, options) if task is None else task
    study = tuned_study(request, study, task, variants)
    planned = [
        PlannedRun(
            request.runs(study.group(variant)) / variant_folder(variant) / f"seed-{seed}",
            f"{study.name}, {LABELS.get(variant, variant)}, seed {seed}",
            run_config(study, options, variant, seed),
        )
        for seed, variant in itertools.product(
            range(study.sizes.seeds) if seeds is None else seeds, variants
        )
    ]
    return task, train_grid(request, planned, task=task)


def tuned_study(request: Request, study: Study, task: Any, variants: Sequence[str]) -> Study:
    """Return the study with the rate of each variant that is best on valid, by a seed that nothing
    reports.

    A best rate at an end of those tried is followed further. A study without factors is returned as
    it is.
    """
    sizes, options = study.sizes, study.options(request)
    if not sizes.factors:
        return study

    def plan(variant: str, rate: float) -> PlannedRun:
        return PlannedRun(
            request.runs(study.group(variant)) / variant_folder(variant) / f"rate-{rate:g}",
            f"{study.name}, {LABELS.get(variant, variant)}, rate {rate:g}",
            run_config(
                replace(study, sizes=replace(sizes, rates={variant: rate})),
                options,
                variant,
                TUNING_SEED,
            ),
        )

    tried = try_rates(
        lambda planned: train_grid(request, planned, task=task, test_batches=1),
        plan,
        {
            variant: rates_about(sizes.rates.get(variant, sizes.learning_rate), sizes.factors)
            for variant in variants
        },
        score=_score,
        most=2 * len(sizes.factors),
    )
    chosen = {variant: best_tried(runs, _score) for variant, runs in tried.items()}
    return replace(study, sizes=replace(sizes, rates={**sizes.rates, **chosen}, factors=()))


def _score(run: FinishedRun) -> float:
    return (
        -run.metric("perplexity,valid")
        if run.config.task == "word_lm"
        else run.metric("accuracy,valid")
    )


def model_name(variant: str, *, scaled: bool) -> str:
    """Return what to call a model, with the scale of its embeddings where it has one."""
    return (
        f"{LABELS[variant]}, scaled"
        if scaled and not variant.startswith("transject")
        else LABELS[variant]
    )


def trained_model(run: FinishedRun) -> Any:
    """Return the model of a run with the weights that were best on valid, in evaluation mode."""
    from wellposed.training import load_run_model

    return load_run_model(run.folder)[0]
