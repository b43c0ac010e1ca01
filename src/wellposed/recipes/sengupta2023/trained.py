"""Sengupta et al. (2023): the runs behind tables 1 to 3 and the figures, trained once and shared; free of torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wellposed.errors import ConfigError, DataError
from wellposed.recipes.recipe import Request
from wellposed.recipes.variants import apply_variant, variant_folder
from wellposed.training.config import ModelOptions, RunConfig, TrainOptions

LABELS = {
    "post_ln": "Transformer",
    "rezero": "Transformer+ReZero",
    "orthogonal": "Orthogonal Transformer",
    "transject": "TransJect",
    "transject_random": "Random-TransJect",
}
VARIANTS = tuple(LABELS)
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
    pooling: str = "mean"
    seeds: int = 3
    warmup: int = 0
    schedule: str = "constant"
    patience: int | None = None
    evaluations: int = 10
    eval_batches: int | None = None
    clip: float = 5.0
    dropout: float = 0.0
    rates: Mapping[str, float] = field(default_factory=dict)
    """Learning rates of variants that do not take `learning_rate`."""


@dataclass(frozen=True)
class Study:
    """One column of a table: a task, where its data is looked for, and its sizes."""

    name: str
    """Short name, for folders and rows."""
    task: str
    sizes: Sizes
    folders: tuple[str, ...] = ()
    """Names of the data set's folder inside the folder given as data; empty where the builtin source is wanted."""
    needs_data: bool = True
    """Whether there is no builtin source."""

    def options(self, request: Request) -> dict[str, Any]:
        """Return the options of the task, with its data."""
        found = find_data(request.data, self.folders)
        if found is None and self.needs_data:
            raise ConfigError(
                f"the study {self.name!r} needs data: give data=FOLDER that holds {' or '.join(self.folders)} "
                "(label and text in tsv, csv or jsonl files), or that is this folder itself"
            )
        return {**self.sizes.options, **({} if found is None else {"data": found})}


def find_data(data: str | None, folders: Sequence[str]) -> str | None:
    """Return ``data/<one of folders>`` where it exists, ``data`` itself where its name is one, else None.

    Raises:
        DataError: ``data`` does not exist.
    """
    if data is None:
        return None
    if data.startswith("hf:"):
        return data if folders else None
    root = Path(data)
    if not root.exists():
        raise DataError(f"{root}: no such file or folder; give a folder that holds {', '.join(folders)}")
    for name in folders:
        if (root / name).exists():
            return str(root / name)
        if name in (root.name, root.parent.name):
            return str(root)
    return None


@dataclass(frozen=True)
class Run:
    """A finished run."""

    study: str
    variant: str
    seed: int
    folder: Path
    metrics: Mapping[str, float]
    """``results`` of result.json: ``accuracy,test`` and so on; empty where training diverged."""
    parameters: int
    seconds: float
    steps: int

    def metric(self, name: str) -> float:
        """Return a metric; nan where training diverged."""
        return float(self.metrics.get(name, math.nan))


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
            pooling=sizes.pooling,  # pyright: ignore[reportArgumentType]
            tie_word_embeddings=False,
            dropout=sizes.dropout,
        ),
        train=TrainOptions(
            steps=sizes.steps,
            batch_size=sizes.batch_size,
            learning_rate=sizes.rates.get(variant, sizes.learning_rate),
            schedule=sizes.schedule,  # pyright: ignore[reportArgumentType]
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
    # only TransJect has experts; an option that a model lacks has to stay at its default
    experts = sizes.experts if config.model.architecture == "transject" else 1
    # a variant may bring a learning rate of its own; here it is the paper's, or that of the study
    return replace(config, model=replace(config.model, num_experts=experts), train=base.train)


def train_study(
    request: Request, study: Study, *, variants: Sequence[str] = VARIANTS, seeds: int | None = None
) -> tuple[Any, list[Run]]:
    """Train the variants of a study, every seed on the same batches; finished runs are kept for the next recipe.

    Returns:
        The task, and the runs, seed by seed.
    """
    from wellposed.tasks import build_task

    task = build_task(study.task, study.options(request))
    runs = []
    count = study.sizes.seeds if seeds is None else seeds
    for seed, variant in itertools.product(range(count), variants):
        request.announce(f"{study.name}, {LABELS.get(variant, variant)}, seed {seed}")
        runs.append(train_variant(request, study, variant, seed, task=task))
    return task, runs


def train_variant(request: Request, study: Study, variant: str, seed: int, *, task: Any = None) -> Run:
    """Train one variant of a study with one seed, or return the finished run of an earlier call."""
    from wellposed.tasks import build_task
    from wellposed.training import train

    options = study.options(request)
    config = run_config(study, options, variant, seed)
    task = build_task(study.task, options) if task is None else task
    folder = (
        request.out / "runs" / f"sengupta2023-{study.name}-{request.scale}" / variant_folder(variant) / f"seed-{seed}"
    )
    result = train(config, folder, resume="auto", progress=False, task=task)
    if result.status == "cancelled":
        raise KeyboardInterrupt
    info = result.result.get("train_info", {})
    metrics = {} if result.status == "failed" else result.result["results"][study.task]
    return Run(
        study.name,
        config.variant,
        config.train.seed,
        folder,
        metrics,
        int(info.get("parameters", 0)),
        float(info.get("seconds", 0.0)),
        int(info.get("steps", 0)),
    )


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard error; the error of one value is nan.

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    """
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))
