"""Kim et al. (2021), figures 4, 9, 11 and tables 2, 3: character-level language models by attention and depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from wellposed.charts import Panel, Series
from wellposed.recipes.kim2021.language_models import LABELS, Run, Sizes, fixed, train_grid, tuned
from wellposed.recipes.recipe import Reproduction, Request

_LEARNED = 0.95
_DATA_NOTE = (
    "blocks of running text where the paper has one sentence an example; validation curves, and the test set read "
    "once, where the paper shows the test set throughout; initial scale s = 2^-4 of L2 attention"
)


def figure_4(request: Request) -> Reproduction:
    """Curves of the language models by attention and depth, with the schedule."""
    kinds = ("lstm", "dot_product", "l2", "l2_tied", "l2_contractive")
    sizes = tuned(request)
    runs = train_grid(request, "figure-4", kinds, sizes)
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
    sizes = tuned(request)
    runs = train_grid(request, "figure-4", kinds, sizes)
    return _table(request, runs, sizes, kinds)


def figure_9(request: Request) -> Reproduction:
    """Tying queries and keys with and without the parameters it saves."""
    kinds = ("l2", "l2_tied", "l2_tied_wide")
    sizes = tuned(request)
    runs = train_grid(request, "figure-4", kinds, sizes)
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
    learned = {kind: depths_learned(runs, kind) for kind in kinds}
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

    sizes = tuned(request)
    (run,) = train_grid(request, "trained", (kind,), _one_setting(sizes))
    model, _ = load_run_model(run.folder)
    attention: nn.Module = model.base_model.layers[0].attention  # pyright: ignore
    return attention.eval().requires_grad_(False)


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
    sizes = fixed(request)
    return train_grid(request, "figure-11", kinds, sizes), sizes, kinds


def depths_learned(runs: Sequence[Run], kind: str) -> list[int]:
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
        learned = {kind: depths_learned(runs, kind) for kind in kinds}
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
