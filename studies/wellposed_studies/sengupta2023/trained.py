"""Sengupta et al. (2023): the tasks of tables 1 to 3, what is trained on them at each scale, once and
for all recipes, and what the paper prints; free of torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wellposed.errors import ConfigError, DataError
from wellposed_lab.compare.runs import PlannedRun
from wellposed_lab.compare.variants import apply_variant, variant_folder
from wellposed_lab.training.config import RunConfig
from wellposed_studies import study as shared
from wellposed_studies.recipe import Request
from wellposed_studies.study import FACTORS, FinishedRun, Sizes, train_grid
from wellposed_studies.tuning import best_tried, rates_about, try_rates

# Columns of the printed tables, in the order of LABELS.
PAPER: Mapping[str, tuple[float, ...]] = {
    "imdb": (81.3, 83.4, 85.1, 88.1, 86.5),
    "ag_news": (88.8, 89.6, 86.3, 88.8, 90.2),
    "lra-listops": (38.4, 38.3, 39.6, 42.2, 40.1),
    "lra-text": (61.9, 59.1, 58.1, 64.9, 64.6),
    "lra-retrieval": (80.7, 79.2, 81.4, 80.3, 80.2),
    "lra-pathfinder": (65.2, 68.3, 68.9, 71.5, 72.6),
    "lra-image": (40.6, 38.6, 42.2, 38.9, 40.2),
    "average": (57.4, 56.7, 58.0, 59.6, 59.5),
    "ptb-words": (598.93, 147.80, 165.78, 127.59, 199.72),
}
PAPER_VALID_PERPLEXITY = (636.55, 161.52, 179.98, 134.82, 215.68)
ONE_HEAD, ONE_EXPERT = -2.1, -4.7
"""Points on IMDb that the Transformer loses with a single head, and TransJect with a single expert
(on valid)."""
ENTROPY: Mapping[str, float] = {"TransJect": -1.3, "Transformer": 5.8}
"""Mean entropy on IMDb, figure 3a; it gives 0.12 and 0.13 as standard deviations."""
PART_ENTROPY: Mapping[str, float] = {"TransJect": -2.2, "Transformer": 0.67}
"""Mean entropy of experts and of heads, figure 3b."""
FACTOR = 1.0
"""About the median activation factor of TransJect, figure 3a; of the other models no number is
printed."""
LARGEST_WEIGHT = 0.33
"""What the residual weights of figure 5 stay below."""
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
SCALE_NOTE = (
    'the paper prints no scale of the embeddings: ours are drawn from N(0, 1/D), and "scaled"'
    " multiplies them by sqrt(D), so that they begin as N(0, 1), as in the authors' code"
)
SEEDS_NOTE = "at mini scale 3 seeds could not say; 10 were drawn then"
TUNING_SEED = 1000
PAPER_WIDTH = 512
_TEXTS = {"imdb": ("imdb", "aclImdb"), "ag_news": ("ag_news",)}
# The words, where the folder holds the characters of the same corpus too.
_WORDS = ("ptb/ptb.train.txt.gz", "ptb/ptb.train.txt", "ptb.train.txt.gz", "ptb.train.txt", "ptb")
_TOY: Mapping[str, Any] = {
    "width": 8,
    "batch_size": 4,
    "experts": 2,
    "heads": 2,
    "evaluations": 1,
    "factors": (),
}
_MINI: Mapping[str, Any] = {"seeds": 3, "eval_batches": 20, "evaluations": 8, "factors": ()}
_MEDIUM: Mapping[str, Any] = {"seeds": 5, "eval_batches": 40, "evaluations": 12}
# Of each model, in the order of VARIANTS, the rate that is best on valid after 150 to 400 steps, with one
# seed that no table reports, among rates a factor of three apart: around 1e-2 for the Transformers
# and 1e-1 for TransJect, whose weights turn and whose embedding has entries of size one. Measured
# by benchmarks/sengupta2023_rates.py; every rate tried is in benchmarks/HISTORY.md.
_MINI_RATES = {
    "imdb": (3e-3, 1e-2, 3e-2, 1e-1, 1e-1),
    "ag_news": (3e-3, 1e-2, 1e-2, 3e-1, 1e-1),
    "ptb-words": (3e-3, 1e-2, 1e-2, 3e-2, 3e-2),
    "listops": (3e-3, 3e-3, 1e-2, 3e-1, 1e-1),
    "text": (1e-2, 1e-2, 3e-2, 1e-1, 1e-1),
    "retrieval": (1e-2, 3e-3, 3e-2, 3e-2, 3e-2),
    "pathfinder": (1e-2, 1e-2, 1e-2, 1e-1, 1e-1),
    "image": (3e-3, 1e-2, 3e-2, 1e-1, 3e-2),
}
_ARENA_FOLDERS = {
    "listops": ("listops_lra", "lra_release/listops-1000"),
    "text": ("imdb", "aclImdb"),
    "retrieval": ("aan", "tsv_data", "ag_news"),
    "pathfinder": ("pathfinder32", "curv_contour_length_14"),
    "image": ("cifar10", "cifar-10-batches-bin", "cifar-10-batches-py", "cifar10_subset"),
}
_PATHS = {"size": 16, "contour_length": 3, "distractors": 2, "distractor_length": 1}
_TOY_PATHS = {"size": 16, "contour_length": 2, "distractors": 0}


def _rows(train: int, others: int) -> dict[str, int]:
    return {"num_train": train, "num_valid": others, "num_test": others}


_ARENA: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "listops": (_rows(40, 10), {"num_train": 20_000}, {"num_train": 40_000}),
    "text": tuple({"tokenizer": "byte", "max_length": length} for length in (24, 256, 512)),
    "retrieval": (
        {**_rows(20, 8), "max_length": 16},
        {**_rows(4000, 400), "max_length": 256},
        {**_rows(10_000, 1000), "max_length": 256},
    ),
    "pathfinder": (
        {**_rows(8, 4), **_TOY_PATHS},
        {**_rows(2000, 300), **_PATHS},
        {**_rows(10_000, 1000), **_PATHS},
    ),
    "image": ({"size": 4, "limit_train": 40}, {"size": 16}, {"size": 16}),
}
"""Options of each task of the Long Range Arena at toy, mini and medium scale."""


@dataclass(frozen=True)
class Study:
    """One column of a table: a task, where its data is looked for, and its sizes."""

    name: str
    """Short name, for folders and rows."""
    task: str
    sizes: Sizes
    folders: tuple[str, ...] = ()
    """Names of the data set's folder inside the folder given as data."""
    needs_data: bool = True
    """Whether there is no builtin source."""
    scale_embeddings: bool = True
    """Whether Transformers multiply embeddings by sqrt(D), as is common; the paper prints no
    scale."""
    start: str = "rezero"
    """How TransJect's residual weights begin: rezero, at 0, or sigmoid, at one half; the paper asks
    for both."""

    def group(self, variant: str) -> str:
        """Return the name of the folder of a variant's runs; TransJect has no such scale."""
        unscaled = not self.scale_embeddings and not variant.startswith("transject")
        return f"sengupta2023-{self.name}{'-unscaled' if unscaled else ''}"

    def model_name(self, variant: str) -> str:
        """Return what to call a model, with the scale of its embeddings where it has one."""
        scaled = self.scale_embeddings and not variant.startswith("transject")
        return f"{LABELS[variant]}, scaled" if scaled else LABELS[variant]

    def scales(self) -> list[Study]:
        """Return the study without a scale of embeddings and with it."""
        return [replace(self, scale_embeddings=scaled) for scaled in (False, True)]

    def resized(self, name: str, **sizes: Any) -> Study:
        """Return the study under another name with some sizes changed."""
        return replace(self, name=f"{self.name}-{name}", sizes=replace(self.sizes, **sizes))

    def options(self, request: Request) -> dict[str, Any]:
        """Return the options of the task, with its data."""
        found = find_data(request.data, self.folders)
        if found is None and self.needs_data:
            raise ConfigError(
                f"the study {self.name!r} needs data: give data=FOLDER that holds"
                f" {' or '.join(self.folders)} (label and text in tsv, csv or jsonl files), or that"
                " is this folder itself"
            )
        known = ("pooling", "schedule", "patience")
        own = {name: value for name, value in self.sizes.options.items() if name not in known}
        return {**own, **({} if found is None else {"data": found})}


def text_study(request: Request, name: str) -> Study:
    """Return IMDb or AG News (table 1): L = 6, E = 4, d = 512, mean pooling, Adam 5e-4, 30 epochs
    of batch 32."""
    # Medium: 5 epochs of the 20000 or 9000 texts at hand; paper: 30 of 25000.
    length, steps = {"imdb": (96, 3125), "ag_news": (48, 1406)}[name]
    short = {"max_words": 10_000, "max_length": length, "schedule": "cosine"}
    few = {**short, "max_words": 3000, "max_length": 48, "limit_train": 800}
    toy = {"max_words": 50, "max_length": 12}
    whole = {"tokenizer": "hf:bert-base-uncased", "max_length": 512, "patience": 4}
    sizes = request.pick(
        toy=Sizes(3, 2, eval_batches=2, options=toy, **_TOY),
        # So few texts that every model overfits, and its best weights lie well before the end.
        mini=Sizes(
            400,
            width=32,
            batch_size=16,
            options=few,
            warmup=40,
            **{**_MINI, "seeds": 10, "evaluations": 12, "eval_batches": 40},
        ),
        medium=Sizes(
            steps, learning_rate=5e-4, options=short, warmup=150, factors=FACTORS, **_MEDIUM
        ),
        # Heads are not printed; 8 as in Vaswani et al. (2017).
        paper=Sizes(
            23_430,
            3,
            PAPER_WIDTH,
            6,
            8,
            learning_rate=5e-4,
            options=whole,
            evaluations=30,
            factors=(),
        ),
    )
    return Study(name, "text_classification", _with_rates(request, sizes, name), _TEXTS[name])


def _with_rates(request: Request, sizes: Sizes, name: str) -> Sizes:
    """Return the sizes with the rate that each variant has at mini scale."""
    tuned = request.scale in ("mini", "medium")
    rates = dict(zip(VARIANTS, _MINI_RATES[name], strict=True)) if tuned else {}
    return replace(sizes, rates=rates)


def arena_studies(request: Request) -> list[Study]:
    """Return the five tasks of the Long Range Arena (table 2): L = 2, E = 4, d = 512, 50000
    steps."""
    return [arena_study(request, name) for name in _ARENA]


def arena_study(request: Request, name: str) -> Study:
    """Return one task of the Long Range Arena."""
    toy, mini, medium = _ARENA[name]
    options = dict(request.pick(toy=toy, mini=mini, medium=medium, paper={}))
    folders, is_text = _ARENA_FOLDERS[name], name == "text"
    if name in ("listops", "pathfinder") and find_data(request.data, folders) is not None:
        options = {}  # they bound what is generated
    options |= {"pooling": "mean" if is_text else "max"}
    cosine = {**options, "schedule": "cosine"}
    sizes = request.pick(
        toy=Sizes(2, layers=1, eval_batches=1, options=options, **_TOY),
        mini=Sizes(
            200, width=32, batch_size=16, learning_rate=3e-3, options=cosine, warmup=20, **_MINI
        ),
        medium=Sizes(
            1500,
            width=48,
            batch_size=16,
            learning_rate=1e-4,
            options=cosine,
            warmup=100,
            factors=(),
            **_MEDIUM,
        ),
        paper=None,
    )
    task = "text_classification" if is_text else name
    return Study(f"lra-{name}", task, _with_rates(request, sizes, name), folders, is_text)


def words_study(request: Request) -> Study:
    """Return Penn Treebank words (table 3): L = 6, d = 512, 35 words, Adam 0.01, 10 epochs of batch
    16."""
    toy = {"max_words": 40, "seq_len": 8, "limit_words": 400}
    mini = {"max_words": 1000, "seq_len": 36, "limit_words": 30_000, "schedule": "cosine"}
    # Three epochs of blocks of 35 words.
    medium = {"max_words": 10_000, "seq_len": 36, "schedule": "cosine"}
    sizes = request.pick(
        toy=Sizes(2, layers=1, eval_batches=1, options=toy, **_TOY),
        mini=Sizes(
            400, width=32, batch_size=16, options=mini, warmup=40, **{**_MINI, "evaluations": 12}
        ),
        medium=Sizes(
            2500, learning_rate=1e-2, options=medium, warmup=200, factors=FACTORS, **_MEDIUM
        ),
        paper=None,
    )
    sizes = _with_rates(request, sizes, "ptb-words")
    return Study("ptb-words", "word_lm", sizes, _WORDS, needs_data=False)


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
    # A variant may bring a learning rate of its own; here it is the paper's, or that of the study.
    return replace(config, model=replace(config.model, **parts), train=base.train)


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
    """Return the study with the rate of each variant that is best on valid, by a seed that nothing
    reports.

    A best rate at an end of those tried is followed further. A study without factors is returned as
    it is.
    """
    sizes, options = study.sizes, study.options(request)
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
