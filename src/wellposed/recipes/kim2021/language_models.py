"""Kim et al. (2021): the character-level language models that its figures share, and how they are trained."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellposed.recipes.recipe import Request
from wellposed.training.config import ModelOptions, RunConfig, TrainOptions

HEADS = 8
LABELS = {
    "dot_product": "dot product",
    "l2": "L2",
    "l2_tied": "tied L2",
    "l2_contractive": "contractive L2",
    "l2_tied_wide": "tied L2, twice the columns",
    "lstm": "LSTM",
}
# s is that of appendix I. The paper divides by its bound of the inf-norm, we by ours, which is never larger.
_L2_INIT: Mapping[str, Any] = {"init": "kim2021", "l2_init_scale": 2.0**-4}
ATTENTIONS: Mapping[str, Mapping[str, Any]] = {
    "dot_product": {"attention": "dot_product"},
    "l2": {"attention": "l2", **_L2_INIT},
    "l2_tied": {"attention": "l2_tied", **_L2_INIT},
    "l2_contractive": {"attention": "l2_contractive", "contractive": 0.999, "lipschitz_norm": "inf", **_L2_INIT},
    "l2_tied_wide": {"attention": "l2_tied", "query_width": 2, **_L2_INIT},
    "lstm": {"architecture": "lstm"},
}
"""Options of `ModelOptions` by the recipe's name of a model."""
# Steps of one pass over the train split of the character-level Penn Treebank at batch 64 and 288 tokens.
_EPOCH = 272


@dataclass(frozen=True)
class Sizes:
    """What is trained at a scale."""

    width: int
    seq_len: int
    batch_size: int
    steps: int
    depths: tuple[int, ...]
    dropouts: tuple[float, ...] = (0.0,)
    gammas: tuple[float, ...] = (0.5,)
    warmups: tuple[int, ...] = (1000,)
    fixed_rate: float | None = None
    """Learning rate without schedule or warm-up."""
    seeds: int = 1
    limit_chars: int | None = None
    eval_batches: int | None = None
    """Batches of valid, and of test at the end; all where not given."""
    evaluations: int = 10


def tuned(request: Request) -> Sizes:
    """The experiments with the schedule of appendix I; paper scale tries its whole grid, chosen on valid."""
    return request.pick(
        toy=Sizes(16, 16, 4, 4, (1, 2), warmups=(2,), limit_chars=4000, eval_batches=2),
        mini=Sizes(64, 64, 16, 300, (1, 2, 3), gammas=(0.5,), warmups=(100,), limit_chars=400_000, eval_batches=20,
        evaluations=5),
        paper=Sizes(
            512, 288, 64, 100 * _EPOCH, (1, 2, 3, 4, 5),
            dropouts=(0.0, 0.1, 0.2), gammas=(0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0), warmups=(1000, 2000, 4000, 8000),
            evaluations=100,
        ),
    )  # fmt: skip


def fixed(request: Request) -> Sizes:
    """The experiments with a fixed learning rate (the paper does not print it)."""
    return request.pick(
        toy=Sizes(16, 16, 4, 4, (1, 2), fixed_rate=1e-3, limit_chars=4000, eval_batches=2),
        mini=Sizes(
            64, 64, 16, 100, (2, 6, 12), fixed_rate=1e-3, seeds=3, limit_chars=400_000, eval_batches=20, evaluations=4
        ),
        paper=Sizes(
            512, 288, 64, 20 * _EPOCH, (2, 4, 6, 8, 10, 12, 14, 16, 18), fixed_rate=1e-4, evaluations=100
        ),
    )  # fmt: skip


def run_config(
    request: Request, sizes: Sizes, kind: str, depth: int, *, seed: int = 0, dropout: float = 0.0, gamma: float = 1.0,
    warmup: int = 0,
) -> RunConfig:  # fmt: skip
    """Return the run of one attention (or ``"lstm"``) at one depth: post-LN, Adam (0.9, 0.98), no clipping or decay."""
    fixed = sizes.fixed_rate is not None
    options: dict[str, Any] = {"seq_len": sizes.seq_len}
    if request.data is not None:
        options["data"] = request.data
    if sizes.limit_chars is not None:
        options["limit_chars"] = sizes.limit_chars
    lstm = kind == "lstm"
    return RunConfig(
        task="char_lm",
        task_options=options,
        variant=kind,
        model=ModelOptions(
            **ATTENTIONS[kind],
            hidden_size=sizes.width,
            num_hidden_layers=depth,
            num_attention_heads=HEADS,
            activation="gelu" if lstm else "relu",
            position="learned" if lstm else "sinusoidal",
            tie_word_embeddings=False,
            dropout=dropout,
        ),
        train=TrainOptions(
            steps=sizes.steps,
            batch_size=sizes.batch_size,
            schedule="constant" if fixed else "kim2021",
            learning_rate=sizes.fixed_rate or 1e-3,
            gamma=gamma,
            warmup_steps=warmup,
            weight_decay=0.0,
            max_grad_norm=0.0,
            eval_every=max(1, sizes.steps // sizes.evaluations),
            eval_batches=sizes.eval_batches,
            checkpoint_every=sizes.steps,
            log_every=max(1, sizes.steps // 20),
            seed=seed,
        ),
    )


@dataclass(frozen=True)
class Run:
    """A finished run of the grid."""

    kind: str
    depth: int
    seed: int
    folder: Path
    setting: str
    test: float
    """Test NLL, nats per character; infinite where training diverged."""
    valid: float
    entropy: float
    """Of single characters."""
    parameters: int
    curve: tuple[tuple[int, str, float], ...]
    """(step, split, NLL)."""


class _ShortTest:
    """A task of whose test split only the first batches are read: at mini scale the whole would cost most of a run."""

    def __init__(self, task: Any, batches: int) -> None:
        self._task, self._batches = task, batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def batches(self, split: str, batch_size: int, *, seed: int, epoch: int) -> list[list[int]]:
        """Return the batches of a split, the test split cut short."""
        order = self._task.batches(split, batch_size, seed=seed, epoch=epoch)
        return order[: self._batches] if split == "test" else order


def train_grid(request: Request, group: str, kinds: Sequence[str], sizes: Sizes) -> list[Run]:
    """Train each kind at each depth and seed with every setting; keep the setting that is best on valid."""
    from wellposed.tasks import build_task

    first = run_config(request, sizes, kinds[0], sizes.depths[0], warmup=1)
    task: Any = build_task("char_lm", first.task_options)
    if sizes.eval_batches is not None:
        task = _ShortTest(task, sizes.eval_batches)
    settings = [
        {"dropout": dropout, "gamma": gamma, "warmup": warmup}
        for dropout, gamma, warmup in itertools.product(
            sizes.dropouts, (1.0,) if sizes.fixed_rate else sizes.gammas, (0,) if sizes.fixed_rate else sizes.warmups
        )
    ]
    runs = []
    for kind, depth, seed in itertools.product(kinds, sizes.depths, range(sizes.seeds)):
        request.announce(f"{LABELS[kind]}, {depth} layers, seed {seed}")
        tried = []
        for setting in settings:
            name = "-".join(f"{key}{value:g}" for key, value in setting.items())
            folder = request.out / "runs" / f"{group}-{request.scale}" / f"{kind}-{depth}-seed{seed}" / name
            tried.append(_train_one(task, run_config(request, sizes, kind, depth, seed=seed, **setting), folder, name))
        runs.append(min(tried, key=lambda run: run.valid))
    return runs


def _train_one(task: Any, config: RunConfig, folder: Path, setting: str) -> Run:
    from wellposed.training import read_metrics, train

    result = train(config, folder, resume="auto", progress=False, task=task)
    if result.status == "cancelled":
        raise KeyboardInterrupt
    found = result.result.get("results", {}).get("char_lm", {})
    failed = result.status == "failed"
    curve = tuple(
        (int(row["step"]), str(row["split"]), float(row["loss"]))
        for row in read_metrics(folder)
        if row["split"] in ("train", "valid") and math.isfinite(float(row["loss"]))
    )
    return Run(
        config.variant,
        config.model.num_hidden_layers,
        config.train.seed,
        folder,
        setting,
        math.inf if failed else float(found["nats_per_char,test"]),
        math.inf if failed else float(found["nats_per_char,valid"]),
        float(task.reference()["nats_per_char"]),
        int(result.result.get("train_info", {}).get("parameters", 0)),
        curve,
    )
