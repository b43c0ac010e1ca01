"""Sengupta et al. (2023): tasks of tables 1 to 3, their trainings and printed results; no torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wellposed.errors import ConfigError, DataError
from wellposed_lab.compare.rates import rates_about
from wellposed_lab.compare.runs import PlannedRun
from wellposed_lab.compare.variants import apply_variant, variant_folder
from wellposed_lab.training.config import RunConfig, read_toml
from wellposed_studies import study as shared
from wellposed_studies.recipe import Request
from wellposed_studies.study import FinishedRun, Sizes, sizes_at, train_grid
from wellposed_studies.tuning import best_tried, try_rates

PRINTED: Mapping[str, Any] = read_toml(Path(__file__).with_name("printed.toml"))
PAPER: Mapping[str, Sequence[float]] = PRINTED["test"]
"""Columns of tables 1 to 3, in the order of LABELS."""
PAPER_VALID_PERPLEXITY: Sequence[float] = PRINTED["valid"]["ptb-words"]
ONE_HEAD = -2.1
ONE_EXPERT = -4.7
"""Points that Transformer loses on IMDb with one head, and TransJect with one expert (on valid)."""
ENTROPY: Mapping[str, float] = {"TransJect": -1.3, "Transformer": 5.8}
"""Mean entropy on IMDb, figure 3a, with standard deviations 0.12 and 0.13."""
PART_ENTROPY: Mapping[str, float] = {"TransJect": -2.2, "Transformer": 0.67}
"""Mean entropy of experts and of heads, figure 3b."""
FACTOR = 1.0
"""Approximate median activation factor of TransJect, figure 3a; no other model's is printed."""
LARGEST_WEIGHT = 0.33
"""Upper limit of the residual weights, figure 5."""
GATE_MODE = 0.25
"""Mode of the expert weights, figure 7."""


LABELS = {
    "post_ln": "Transformer",
    "rezero": "Transformer+ReZero",
    "orthogonal": "Orthogonal Transformer",
    "transject": "TransJect",
    "transject_random": "Random-TransJect",
}
VARIANTS = tuple(LABELS)
SCALED = ", scaled"
"""Ending of the name of a model whose embeddings are scaled."""
NEIGHBOURS_NOTE = (
    "entropies in nats by the three nearest neighbours (the paper names no estimator). Entropy"
    " depends on scale"
)
SCALE_NOTE = (
    'the paper prints no scale of the embeddings. Its released code draws them from N(0, 1): "scaled"'
    " here. The others start as N(0, 1/D). A verdict needs that both agree"
)
SEEDS_NOTE = "at mini scale 3 seeds were undecided, so 10 were trained"
TUNING_SEED = 1000
_TEXTS = {"imdb": ("imdb", "aclImdb"), "ag_news": ("ag_news",)}
# The words, even if the folder also holds the characters of the same corpus.
_WORDS = ("ptb/ptb.train.txt.gz", "ptb/ptb.train.txt", "ptb.train.txt.gz", "ptb.train.txt", "ptb")
_MINI_RATES: Mapping[str, Sequence[float]] = read_toml(Path(__file__).with_name("rates.toml"))
_ARENA_FOLDERS = {
    "listops": ("listops_lra", "lra_release/listops-1000"),
    "text": ("imdb", "aclImdb"),
    "retrieval": ("aan", "tsv_data", "ag_news"),
    "pathfinder": ("pathfinder32", "curv_contour_length_14"),
    "image": ("cifar10", "cifar-10-batches-bin", "cifar-10-batches-py", "cifar10_subset"),
}


@dataclass(frozen=True)
class Study:
    """One column of a table: a task, the folders of its data, and its sizes."""

    name: str
    """Short name, for folders and rows."""
    task: str
    sizes: Sizes
    folders: tuple[str, ...] = ()
    """Names of the data set's folder inside the folder given as data."""
    needs_data: bool = True
    """Whether there is no builtin source."""
    scale_embeddings: bool = True
    """Whether Transformers multiply embeddings by sqrt(D); the paper prints no scale."""
    start: str = "rezero"
    """Start of TransJect's residual weights: rezero (0) or sigmoid (1/2). The paper has both."""

    def group(self, variant: str) -> str:
        """Return the folder name of a variant's runs; TransJect has no scale of embeddings."""
        unscaled = not self.scale_embeddings and not variant.startswith("transject")
        return f"sengupta2023-{self.name}{'-unscaled' if unscaled else ''}"

    def model_name(self, variant: str) -> str:
        """Return the name of a model, with the scale of its embeddings if it has one."""
        scaled = self.scale_embeddings and not variant.startswith("transject")
        return f"{LABELS[variant]}{SCALED}" if scaled else LABELS[variant]

    def scales(self) -> list[Study]:
        """Return the study without a scale of embeddings and with it."""
        return [replace(self, scale_embeddings=scaled) for scaled in (False, True)]

    def resized(self, name: str, **sizes: Any) -> Study:
        return replace(self, name=f"{self.name}-{name}", sizes=replace(self.sizes, **sizes))

    def options(self, request: Request) -> dict[str, Any]:
        folder = find_data(request.data, self.folders)
        if folder is None and self.needs_data:
            raise ConfigError(
                f"the study {self.name!r} needs data: give data=FOLDER that holds"
                f" {' or '.join(self.folders)} (label and text in tsv, csv or jsonl files), or this"
                " folder itself"
            )

        training_options = ("pooling", "schedule", "patience")
        options = {
            name: value
            for name, value in self.sizes.options.items()
            if name not in training_options
        }
        return {**options, **({} if folder is None else {"data": folder})}


def text_study(request: Request, name: str) -> Study:
    """Return IMDb or AG News (table 1): L = 6, E = 4, d = 512, Adam 5e-4, 30 epochs, batch 32."""
    sizes = _sizes(request, name)
    return Study(name, "text_classification", sizes, _TEXTS[name])


def _sizes(request: Request, name: str) -> Sizes:
    tuned = request.scale in ("mini", "medium")
    rates = dict(zip(VARIANTS, _MINI_RATES[name], strict=True)) if tuned else {}
    return replace(sizes_at(request, f"sengupta2023/{name}"), rates=rates)


def arena_studies(request: Request) -> list[Study]:
    """Return the Long Range Arena's five tasks (table 2: L = 2, E = 4, d = 512, 50000 steps)."""
    return [arena_study(request, name) for name in _ARENA_FOLDERS]


def arena_study(request: Request, name: str) -> Study:
    sizes = _sizes(request, name)
    folders = _ARENA_FOLDERS[name]
    if name in ("listops", "pathfinder") and find_data(request.data, folders) is not None:
        # Other options only limit the generated data.
        usable = {
            name: value for name, value in sizes.options.items() if name in ("pooling", "schedule")
        }
        sizes = replace(sizes, options=usable)
    is_text = name == "text"
    task = "text_classification" if is_text else name
    return Study(f"lra-{name}", task, sizes, folders, is_text)


def words_study(request: Request) -> Study:
    """Return Penn Treebank (table 3): L = 6, d = 512, 35 words, Adam 0.01, 10 epochs, batch 16."""
    sizes = _sizes(request, "ptb-words")
    return Study("ptb-words", "word_lm", sizes, _WORDS, needs_data=False)


def find_data(data: str | None, folders: Sequence[str]) -> str | None:
    """Return ``data/<one of folders>``, or ``data`` if named so, or None; `DataError` if absent."""
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
    """Raise `DataError` if data is given and no study (all have builtin sources) would read it."""
    if data is not None and not any(find_data(data, study.folders) for study in studies):
        wanted = ", ".join(folder for study in studies for folder in study.folders)
        raise DataError(
            f"{data}: is none of {wanted} and holds none; give one, or leave --data out"
        )


def run_config(study: Study, options: Mapping[str, Any], variant: str, seed: int) -> RunConfig:
    """Return the run of one variant: the paper's Adam (0.9, 0.98), and the sizes of the study."""
    sizes = study.sizes
    base = shared.run_config(
        study.task,
        options,
        sizes,
        seed=seed,
        model={
            "intermediate_size": None,
            "num_experts": sizes.experts,
            "position": "sinusoidal",
            "pooling": sizes.options.get("pooling", "mean"),
            "tie_word_embeddings": False,
            "dropout": sizes.dropout,
            "scale_embeddings": study.scale_embeddings,
        },
        learning_rate=dict(sizes.rates).get(variant, sizes.learning_rate),
        schedule=sizes.options.get("schedule", "constant"),
        patience=sizes.options.get("patience"),
        weight_decay=0.0,
        max_grad_norm=5.0,
    )
    config = apply_variant(variant, base)
    # Only TransJect has experts; an option that a model lacks has to stay at its default.
    parts: dict[str, Any] = {"num_experts": 1}
    if config.model.architecture == "transject":
        parts = {"num_experts": sizes.experts, "residual": study.start}

    if not sizes.layers and (where := config.constrain.where):
        # A pattern that matches no weight is refused; these are the ones outside the layers.
        outside = [
            path for path in where.split(",") if path.endswith((".basis", ".embeddings.token"))
        ]
        config = replace(config, constrain=replace(config.constrain, where=",".join(outside)))

    # A variant may set a learning rate; here it is the paper's, or the study's.
    return replace(config, model=replace(config.model, **parts), train=base.train)


def train_study(
    request: Request,
    study: Study,
    *,
    variants: Sequence[str] = VARIANTS,
    seeds: Sequence[int] | None = None,
    task: Any = None,
) -> tuple[Any, list[FinishedRun]]:
    """Train the variants, every seed on the same batches; return the task, and the runs by seed."""
    from wellposed_lab.tasks.task import build_task

    options = study.options(request)
    task = build_task(study.task, options) if task is None else task
    study = tuned_study(request, study, task, variants)
    seeds = range(study.sizes.seeds) if seeds is None else seeds
    planned = [
        _planned(request, study, options, variant, f"seed-{seed}", seed)
        for seed, variant in itertools.product(seeds, variants)
    ]
    few = study.sizes.eval_batches if request.scale == "mini" else None
    return task, train_grid(request, planned, task=task, test_batches=few)


def _planned(
    request: Request, study: Study, options: Mapping[str, Any], variant: str, what: str, seed: int
) -> PlannedRun:
    folder = request.runs(study.group(variant)) / variant_folder(variant) / what
    label = f"{study.name}, {LABELS.get(variant, variant)}, {what.replace('-', ' ', 1)}"
    return PlannedRun(folder, label, run_config(study, options, variant, seed))


def tuned_study(request: Request, study: Study, task: Any, variants: Sequence[str]) -> Study:
    """Return the study with each variant's best rate on valid, by a seed that nothing reports.

    If the best is at an end of those tried, further ones follow. Without factors: unchanged.
    """
    sizes = study.sizes
    options = study.options(request)
    if not sizes.factors:
        return study

    def plan(variant: str, rate: float) -> PlannedRun:
        at_rate = replace(study, sizes=replace(sizes, rates={variant: rate}))
        return _planned(request, at_rate, options, variant, f"rate-{rate:g}", TUNING_SEED)

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
    language_model = run.config.task == "word_lm"
    return -run.metric("perplexity,valid") if language_model else run.metric("accuracy,valid")
