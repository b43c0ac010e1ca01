"""Sengupta et al. (2023), section 4.2: the Transformer with one head and TransJect with one expert,
on IMDb."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from wellposed.recipes.recipe import Request
from wellposed_studies.runs import mean_and_error, plus_minus
from wellposed_studies.sengupta2023.printed import ONE_EXPERT, ONE_HEAD
from wellposed_studies.sengupta2023.trained import LABELS, Study, train_study, tuned_study
from wellposed_studies.verdicts import within

_WORDS = {True: "a loss", False: "no loss", None: "cannot be said"}


@dataclass(frozen=True)
class Ablation:
    """A model without one of its parts, beside itself with it."""

    model: str
    split: str
    printed: float
    """Points of accuracy that the paper says it changes by."""
    scores: Sequence[float]
    """Percent, seed by seed."""
    changes: Sequence[float]
    """Points less than the whole model of the same seed."""

    @property
    def loses(self) -> bool | None:
        """Whether the part is missed; None where the seeds cannot tell."""
        return within(self.changes, high=0)


def ablations(request: Request, study: Study) -> list[Ablation]:
    """Return both ablations on IMDb, trained at the rate of the whole model; none on another
    task."""
    if study.name != "imdb":
        return []
    return [
        _ablation(request, study, "post_ln", option="heads", split="test", printed=ONE_HEAD),
        _ablation(request, study, "transject", option="experts", split="valid", printed=ONE_EXPERT),
    ]


def _ablation(
    request: Request, study: Study, variant: str, *, option: str, split: str, printed: float
) -> Ablation:
    task, whole = train_study(request, study, variants=(variant,))
    study = tuned_study(request, study, task, (variant,))
    changed = replace(
        study, name=f"{study.name}-{option}1", sizes=replace(study.sizes, **{option: 1})
    )
    _, runs = train_study(request, changed, variants=(variant,), task=task)
    scores = [100 * run.metric(f"accuracy,{split}") for run in runs]
    changes = [
        score - 100 * run.metric(f"accuracy,{split}")
        for score, run in zip(scores, whole, strict=True)
    ]
    return Ablation(f"{LABELS[variant]}, one {option[:-1]}", split, printed, scores, changes)


def ablation_row(ablation: Ablation) -> dict[str, Any]:
    """Return the row of a table."""
    score, error = mean_and_error(ablation.scores)
    change, change_error = mean_and_error(ablation.changes)
    return {
        "task": "imdb",
        "model": ablation.model,
        "split": ablation.split,
        "ours": score,
        "standard_error": error,
        "change": change,
        "change_error": change_error,
        "paper_change": ablation.printed,
        "seeds": " ".join(f"{value:.2f}" for value in ablation.scores),
    }


def about(ablations: Sequence[Ablation]) -> str:
    """Return the changes in words beside those that the paper prints."""
    return "".join(
        f"; {found.model} ({found.split}) {plus_minus(mean_and_error(found.changes))} points, paper"
        f" {found.printed:g}: {_WORDS[found.loses]}"
        for found in ablations
    )
