"""Kim et al. (2021), figures 4, 9, 11 and tables 2, 3: character-level language models by attention and depth."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from wellposed.recipes._charts import Panel, Series
from wellposed.recipes._recipe import Reproduction, Request
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
_LEARNED = 0.95
_DATA_NOTE = (
    "blocks of running text where the paper has one sentence an example; validation curves, and the test set read "
    "once, where the paper shows the test set throughout; initial scale s = 2^-4 of L2 attention"
)


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


def _tuned(request: Request) -> Sizes:
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


def _fixed(request: Request) -> Sizes:
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


def figure_4(request: Request) -> Reproduction:
    """Curves of the language models by attention and depth, with the schedule."""
    kinds = ("lstm", "dot_product", "l2", "l2_tied", "l2_contractive")
    sizes = _tuned(request)
    runs = _train_grid(request, "figure-4", kinds, sizes)
    best = {kind: min(run.test for run in runs if run.kind == kind) for kind in kinds}
    gap = best["l2"] - best["dot_product"]
    tied = best["l2_tied"] - best["l2"]
    contractive = best["l2_contractive"] - best["l2_tied"]
    deeper = [run.test for run in runs if run.kind == "l2_contractive"]
    got = ", ".join(f"{LABELS[kind]} {value:.3f}" for kind, value in best.items())
    return Reproduction(
        _curve_rows(runs),
        _curve_panels(runs),
        got=f"best test NLL (nats per character) over {min(sizes.depths)} to {max(sizes.depths)} layers: {got}; "
        f"contractive L2 by depth {' '.join(f'{value:.3f}' for value in deeper)}",
        holds=None if request.scale == "toy" else abs(gap) <= 0.1 and tied >= -0.02 and contractive > 0,
        notes=(_DATA_NOTE, *_grid_note(sizes)),
    )


def table_2(request: Request) -> Reproduction:
    """Best test NLL by attention and depth; the runs are those of figure 4."""
    kinds = ("dot_product", "l2", "l2_tied", "l2_contractive")
    sizes = _tuned(request)
    runs = _train_grid(request, "figure-4", kinds, sizes)
    return _table(request, runs, sizes, kinds)


def figure_9(request: Request) -> Reproduction:
    """Tying queries and keys with and without the parameters it saves."""
    kinds = ("l2", "l2_tied", "l2_tied_wide")
    sizes = _tuned(request)
    runs = _train_grid(request, "figure-4", kinds, sizes)
    best = {kind: min(run.test for run in runs if run.kind == kind) for kind in kinds}
    parameters = {kind: next(run.parameters for run in runs if run.kind == kind) for kind in kinds}
    gained = best["l2_tied"] - best["l2_tied_wide"]
    return Reproduction(
        _curve_rows(runs),
        _curve_panels(runs),
        got="best test NLL (parameters at the least depth): "
        + ", ".join(f"{LABELS[kind]} {best[kind]:.3f} ({parameters[kind]})" for kind in kinds)
        + f"; twice the columns gain {gained:+.3f}",
        holds=None if request.scale == "toy" else abs(gained) <= 0.05,
        notes=(_DATA_NOTE, *_grid_note(sizes)),
    )


def figure_11(request: Request) -> Reproduction:
    """Training curves at a fixed learning rate, by depth."""
    runs, sizes, kinds = _fixed_runs(request)
    learned = {kind: _depths_learned(runs, kind) for kind in kinds}
    deepest = max(sizes.depths)
    got = "; ".join(f"{LABELS[kind]} trains at {', '.join(map(str, learned[kind])) or 'no'} layers" for kind in kinds)
    holds = all(deepest in learned[kind] for kind in kinds[1:]) and deepest not in learned["dot_product"]
    return Reproduction(
        _curve_rows(runs),
        _curve_panels(runs, split="train"),
        got=f"fixed rate {sizes.fixed_rate:g}, no warm-up, {' '.join(map(str, sizes.depths))} layers tried: {got}",
        holds=None if request.scale == "toy" else holds,
        notes=(
            f"a depth trains where its test NLL ends below {_LEARNED:g} of the entropy of single characters",
            _DATA_NOTE,
            *_grid_note(sizes),
        ),
    )


def table_3(request: Request) -> Reproduction:
    """Best test NLL at a fixed learning rate; the runs are those of figure 11."""
    runs, sizes, kinds = _fixed_runs(request)
    return _table(request, runs, sizes, kinds)


def trained_attention(request: Request, kind: str) -> Any:
    """Return the attention of a one-layer language model trained for a while; the run is kept for the next recipe."""
    from wellposed.training import load_run_model

    sizes = _tuned(request)
    (run,) = _train_grid(request, "trained", (kind,), _one_setting(sizes))
    model, _ = load_run_model(run.folder)
    attention: nn.Module = model.base_model.layers[0].attention  # pyright: ignore
    return attention.eval().requires_grad_(False)


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


def _train_grid(request: Request, group: str, kinds: Sequence[str], sizes: Sizes) -> list[Run]:
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


def _one_setting(sizes: Sizes) -> Sizes:
    """One layer, one setting: the middle of each grid."""
    return replace(
        sizes,
        depths=(1,),
        dropouts=sizes.dropouts[:1],
        gammas=(sizes.gammas[len(sizes.gammas) // 2],),
        warmups=(sizes.warmups[len(sizes.warmups) // 2],),
    )


def _fixed_runs(request: Request) -> tuple[list[Run], Sizes, tuple[str, ...]]:
    kinds = ("dot_product", "l2_tied", "l2_contractive")
    sizes = _fixed(request)
    return _train_grid(request, "figure-11", kinds, sizes), sizes, kinds


def _depths_learned(runs: Sequence[Run], kind: str) -> list[int]:
    mine = [run for run in runs if run.kind == kind]
    return [
        depth
        for depth in dict.fromkeys(run.depth for run in mine)
        if all(run.test < _LEARNED * run.entropy for run in mine if run.depth == depth)
    ]


def _table(request: Request, runs: Sequence[Run], sizes: Sizes, kinds: Sequence[str]) -> Reproduction:
    rows = [
        {
            "attention": LABELS[run.kind], "layers": run.depth, "seed": run.seed, "test_nll": run.test,
            "valid_nll": run.valid, "setting": run.setting, "parameters": run.parameters,
        }
        for run in runs
    ]  # fmt: skip
    by_kind = {kind: [run for run in runs if run.kind == kind] for kind in kinds}
    series = [
        Series(LABELS[kind], [run.depth for run in mine], [min(run.test, 2 * run.entropy) for run in mine])
        for kind, mine in by_kind.items()
    ]
    best = {kind: min(mine, key=lambda run: run.test) for kind, mine in by_kind.items()}
    first = {kind: min(run.test for run in mine if run.depth == sizes.depths[0]) for kind, mine in by_kind.items()}
    if sizes.fixed_rate:
        learned = {kind: _depths_learned(runs, kind) for kind in kinds}
        deepest = max(sizes.depths)
        holds = deepest not in learned["dot_product"] and all(deepest in learned[kind] for kind in kinds[1:])
    else:
        holds = max(first.values()) == first["l2_contractive"]
    return Reproduction(
        rows,
        [Panel("test NLL by depth", "layers", "nats per character", series)],
        got="best test NLL: "
        + ", ".join(f"{LABELS[kind]} {run.test:.3f} at {run.depth} layers" for kind, run in best.items())
        + f"; character entropy {runs[0].entropy:.3f}",
        holds=None if request.scale == "toy" else holds,
        notes=(_DATA_NOTE, *_grid_note(sizes)),
    )


def _curve_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    return [
        {"attention": LABELS[run.kind], "layers": run.depth, "seed": run.seed, "step": step, "split": split, "nll": nll}
        for run in runs
        for step, split, nll in run.curve
    ]


def _curve_panels(runs: Sequence[Run], split: str = "valid") -> list[Panel]:
    return [
        Panel(
            LABELS[kind],
            "step",
            f"{split} NLL",
            [
                Series(
                    f"{run.depth} layers" + (f", seed {run.seed}" if run.seed else ""),
                    [step for step, name, _ in run.curve if name == split],
                    [nll for _, name, nll in run.curve if name == split],
                )
                for run in runs
                if run.kind == kind
            ],
        )
        for kind in dict.fromkeys(run.kind for run in runs)
    ]


def _grid_note(sizes: Sizes) -> tuple[str, ...]:
    short = () if sizes.eval_batches is None else (_short_note(sizes),)
    if sizes.fixed_rate or len(sizes.gammas) > 1:
        return short
    setting = ", ".join(
        f"gamma {gamma:g}, warm-up {warmup}" for gamma, warmup in zip(sizes.gammas, sizes.warmups, strict=True)
    )
    return (f"one setting ({setting}) where the paper tunes over 84", *short)


def _short_note(sizes: Sizes) -> str:
    assert sizes.eval_batches is not None
    return (
        f"D = {sizes.width}, {sizes.steps} steps of {sizes.batch_size} x {sizes.seq_len} characters; test NLL on the "
        f"first {sizes.eval_batches * sizes.batch_size * sizes.seq_len} characters"
    )
