"""What makes a comparison of two variants unfair or empty: options of the optimizer that differ, and
penalties that hardly move the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wellposed.options import flat_options
from wellposed_lab.report.runs import Run, tuned_rates

OPTIMIZER_OPTIONS = (
    "learning_rate",
    "gamma",
    "schedule",
    "warmup_steps",
    "warmup_share",
    "decay_steps",
    "steps",
    "epochs",
    "batch_size",
    "gradient_accumulation",
    "optimizer",
    "momentum",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "precision",
)
"""Options of a training that belong to no idea of a variant."""
UNREAD = {"kim2021": ("learning_rate", "decay_steps"), "inverse_sqrt": ("gamma",)}
"""Options that a schedule does not read; other schedules read neither ``gamma`` nor ``decay_steps``."""
PLACEBO = 0.01
"""Part of a weight's size below which its movement by a penalty is too small to be seen."""


def optimizer_differences(run: Run, first: Run) -> list[str]:
    """Return the options of the optimizer that differ from the first variant's, as phrases. Learning
    rates that were searched for both are alike."""
    mine, others = (_optimizer_options(side) for side in (run, first))
    searched = {str(row["variant"]) for row in tuned_rates(run.folder)}
    if {run.variant, first.variant} <= searched:
        del mine["learning_rate"], others["learning_rate"]
    return [
        f"{name.replace('_', ' ')} {_shown(mine.get(name))} ({first.variant}: {_shown(others.get(name))})"
        for name in OPTIMIZER_OPTIONS
        if mine.get(name) != others.get(name)
    ]


def _optimizer_options(run: Run) -> dict[str, Any]:
    train = run.result["config"]["train"]
    unread = UNREAD.get(train.get("schedule"), ("gamma", "decay_steps"))
    return {name: None if name in unread else train.get(name) for name in OPTIMIZER_OPTIONS}


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def placebo(runs: Sequence[Run], first: Run) -> str:
    """Return why a penalty cannot make a difference, or an empty text: nothing else differs from
    the first variant, and it moves the weights by less than `PLACEBO` of their size."""
    if not runs:
        return ""
    moves = [run.result["train_info"].get("penalty_moves") for run in runs]
    estimates = [float(move) for move in moves if isinstance(move, (int, float))]
    if not estimates or len(estimates) < len(moves) or not _differs_by_penalty(runs[0], first):
        return ""

    mean = sum(estimates) / len(estimates)
    if mean >= PLACEBO:
        return ""

    return (
        f"its penalty moves the weights by {100 * mean:.2g} % of their size in these runs, so no"
        f" difference can be seen; {_stronger(runs[0], mean)}"
    )


def _differs_by_penalty(run: Run, first: Run) -> bool:
    mine, others = (flat_options(side.result["config"]) for side in (run, first))
    different = {name for name in {*mine, *others} if mine.get(name) != others.get(name)}
    names = {name for name in different if name not in ("variant", "train.seed")}
    return bool(names) and all(name.startswith("penalty.") for name in names)


def _stronger(run: Run, mean: float) -> str:
    name = run.variant.partition(":")[0]
    strengths = [
        value
        for option, value in (run.result["config"].get("penalty") or {}).items()
        if isinstance(value, float) and value > 0
    ]
    if mean <= 0 or not strengths:
        return "give a larger strength, or more steps"
    return f"give {name}:{max(strengths) / mean:.0e}, which moves them by their size, or more steps"
