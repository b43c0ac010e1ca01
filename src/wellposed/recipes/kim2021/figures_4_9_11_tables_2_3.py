"""Kim et al. (2021), figures 4, 9, 11 and tables 2, 3: character-level language models by attention and depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from wellposed.charts import Panel, lines
from wellposed.recipes.kim2021.language_models import (
    LABELS,
    Sizes,
    character_entropy,
    fixed,
    nll,
    train_models,
    tuned,
)
from wellposed.recipes.recipe import Reproduction, Request
from wellposed.recipes.runs import FinishedRun, curves, depths_trained

_LEARNED = 0.95
_DATA_NOTE = (
    "blocks of running text where the paper has one sentence an example; validation curves, and the test set read "
    "once, where the paper shows the test set throughout; initial scale s = 2^-4 of L2 attention"
)
_FIXED_RATE_KINDS = ("dot_product", "l2_tied", "l2_contractive")


def figure_4(request: Request) -> Reproduction:
    """Curves of the language models by attention and depth, with the schedule."""
    kinds = ("lstm", "dot_product", "l2", "l2_tied", "l2_contractive")
    sizes = tuned(request)
    runs = train_models(request, "figure-4", kinds, sizes)
    best = {kind: nll(run) for kind, run in _best(runs).items()}
    deeper = " ".join(f"{nll(run):.3f}" for run in runs if run.variant == "l2_contractive")
    return _curves(
        runs,
        sizes,
        got=f"best test NLL (nats per character) over {min(sizes.depths)} to {max(sizes.depths)} layers: "
        + ", ".join(f"{LABELS[kind]} {value:.3f}" for kind, value in best.items())
        + f"; contractive L2 by depth {deeper}",
        holds=abs(best["l2"] - best["dot_product"]) <= 0.1
        and best["l2_tied"] - best["l2"] >= -0.02
        and best["l2_contractive"] > best["l2_tied"],
    )


def figure_9(request: Request) -> Reproduction:
    """Tying queries and keys with and without the parameters it saves."""
    kinds = ("l2", "l2_tied", "l2_tied_wide")
    sizes = tuned(request)
    runs = train_models(request, "figure-4", kinds, sizes)
    best = {kind: nll(run) for kind, run in _best(runs).items()}
    parameters = {kind: next(run.info["parameters"] for run in runs if run.variant == kind) for kind in kinds}
    gained = best["l2_tied"] - best["l2_tied_wide"]
    return _curves(
        runs,
        sizes,
        got="best test NLL (parameters at the least depth): "
        + ", ".join(f"{LABELS[kind]} {best[kind]:.3f} ({parameters[kind]})" for kind in kinds)
        + f"; twice the columns gain {gained:+.3f}",
        holds=abs(gained) <= 0.05,
    )


def figure_11(request: Request) -> Reproduction:
    """Training curves at a fixed learning rate, by depth."""
    sizes = fixed(request)
    runs = train_models(request, "figure-11", _FIXED_RATE_KINDS, sizes)
    learned = {kind: depths_learned(runs, kind) for kind in _FIXED_RATE_KINDS}
    got = "; ".join(
        f"{LABELS[kind]} trains at {', '.join(map(str, found)) or 'no'} layers" for kind, found in learned.items()
    )
    return _curves(
        runs,
        sizes,
        split="train",
        got=f"fixed rate {sizes.fixed_rate:g}, no warm-up, {' '.join(map(str, sizes.depths))} layers tried: {got}",
        holds=_only_dot_product_fails(learned, max(sizes.depths)),
        note=f"a depth trains where its test NLL ends below {_LEARNED:g} of the entropy of single characters",
    )


def table_2(request: Request) -> Reproduction:
    """Best test NLL by attention and depth; the runs are those of figure 4."""
    sizes = tuned(request)
    runs = train_models(request, "figure-4", ("dot_product", "l2", "l2_tied", "l2_contractive"), sizes)
    shallow = _best([run for run in runs if run.depth == sizes.depths[0]])
    return _table(runs, sizes, holds=max(map(nll, shallow.values())) == nll(shallow["l2_contractive"]))


def table_3(request: Request) -> Reproduction:
    """Best test NLL at a fixed learning rate; the runs are those of figure 11."""
    sizes = fixed(request)
    runs = train_models(request, "figure-11", _FIXED_RATE_KINDS, sizes)
    learned = {kind: depths_learned(runs, kind) for kind in _FIXED_RATE_KINDS}
    return _table(runs, sizes, holds=_only_dot_product_fails(learned, max(sizes.depths)))


def trained_attention(request: Request, kind: str) -> Any:
    """Return the attention of a one-layer language model trained for a while; the run is kept for the next recipe."""
    from wellposed.training import load_run_model

    sizes = tuned(request)
    # One layer, one setting: the middle of each grid.
    middle = {name: (values[len(values) // 2],) for name in ("gammas", "warmups") if (values := getattr(sizes, name))}
    one = replace(sizes, depths=(1,), dropouts=sizes.dropouts[:1], **middle)
    (run,) = train_models(request, "trained", (kind,), one)
    model, _ = load_run_model(run.folder)
    attention: nn.Module = model.base_model.layers[0].attention  # pyright: ignore
    return attention.eval().requires_grad_(False)


def depths_learned(runs: Sequence[FinishedRun], kind: str) -> list[int]:
    """Return the depths at which every seed ends well below the entropy of single characters."""
    mine = [run for run in runs if run.variant == kind]
    return depths_trained(mine, lambda run: nll(run) < _LEARNED * character_entropy(run))


def _only_dot_product_fails(learned: Mapping[str, Sequence[int]], depth: int) -> bool:
    return all((depth in depths) == (kind != "dot_product") for kind, depths in learned.items())


def _best(runs: Sequence[FinishedRun]) -> dict[str, FinishedRun]:
    """Return the run of each kind with the least test NLL."""
    kinds = dict.fromkeys(run.variant for run in runs)
    return {kind: min((run for run in runs if run.variant == kind), key=nll) for kind in kinds}


def _curves(
    runs: Sequence[FinishedRun], sizes: Sizes, *, got: str, holds: bool, split: str = "valid", note: str | None = None
) -> Reproduction:
    rows = [
        {
            "attention": LABELS[run.variant],
            "layers": run.depth,
            "seed": run.seed,
            "step": step,
            "split": name,
            "nll": loss,
        }
        for run in runs
        for step, name, loss in run.losses()
    ]
    panels = [
        Panel(
            LABELS[kind],
            "step",
            f"{split} NLL",
            curves([run for run in runs if run.variant == kind], split, _depth_and_seed),
        )
        for kind in dict.fromkeys(run.variant for run in runs)
    ]
    return Reproduction(rows, panels, got, holds, (*((note,) if note else ()), *_notes(sizes)))


def _depth_and_seed(run: FinishedRun) -> str:
    return f"{run.depth} layers" + (f", seed {run.seed}" if run.seed else "")


def _table(runs: Sequence[FinishedRun], sizes: Sizes, *, holds: bool) -> Reproduction:
    entropy = character_entropy(runs[0])
    rows = [
        {
            "attention": LABELS[run.variant],
            "layers": run.depth,
            "seed": run.seed,
            "test_nll": nll(run),
            "valid_nll": nll(run, "valid"),
            "setting": run.folder.name,
            "parameters": run.info.get("parameters", 0),
        }
        for run in runs
    ]
    best = ", ".join(f"{LABELS[kind]} {nll(run):.3f} at {run.depth} layers" for kind, run in _best(runs).items())
    cut = [{**row, "test_nll": min(row["test_nll"], 2 * entropy)} for row in rows]
    series = lines(cut, "layers", "test_nll", by="attention")
    return Reproduction(
        rows,
        [Panel("test NLL by depth", "layers", "nats per character", series)],
        got=f"best test NLL: {best}; character entropy {entropy:.3f}",
        holds=holds,
        notes=_notes(sizes),
    )


def _notes(sizes: Sizes) -> tuple[str, ...]:
    notes = [_DATA_NOTE]
    if not sizes.fixed_rate and len(sizes.gammas) == 1:
        setting = f"gamma {sizes.gammas[0]:g}, warm-up {sizes.warmups[0]}"
        notes.append(f"one setting ({setting}) where the paper tunes over 84")
    if sizes.eval_batches is not None:
        notes.append(
            f"D = {sizes.width}, {sizes.steps} steps of {sizes.batch_size} x {sizes.seq_len} characters; test NLL on "
            f"the first {sizes.eval_batches * sizes.batch_size * sizes.seq_len} characters"
        )
    return tuple(notes)
