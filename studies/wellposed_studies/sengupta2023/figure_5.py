"""Sengupta et al. (2023), figure 5: residual weights of trained TransJect models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wellposed.charts import Panel, lines, where
from wellposed.recipes.recipe import Criterion, Reproduction, Request
from wellposed_studies.sengupta2023.measured import figure_studies
from wellposed_studies.sengupta2023.printed import LARGEST_WEIGHT
from wellposed_studies.sengupta2023.states import residual_weights
from wellposed_studies.sengupta2023.trained import train_study, trained_model
from wellposed_studies.verdicts import AGREED


def figure_5(request: Request) -> Reproduction:
    """Residual weights alpha_l / L of trained TransJect models."""
    rows: list[dict[str, Any]] = []
    for study in figure_studies(request):
        _, runs = train_study(request, study, variants=("transject",))
        for run in runs:
            alphas = residual_weights(trained_model(run))
            common = {"task": study.name, "seed": run.seed}
            rows += [
                {**common, "layer": layer, "alpha": alpha, "alpha_over_layers": alpha / len(alphas)}
                for layer, alpha in enumerate(alphas, start=1)
            ]
    weights = [row["alpha_over_layers"] for row in rows]
    panels = [
        Panel(
            task,
            "layer",
            "alpha / L",
            lines(
                where(rows, task=task),
                "layer",
                "alpha_over_layers",
                by=lambda row: f"seed {row['seed']}",
            ),
            level=(f"paper: below {LARGEST_WEIGHT:g}", LARGEST_WEIGHT),
        )
        for task in dict.fromkeys(row["task"] for row in rows)
    ]
    return Reproduction(
        rows,
        panels,
        got=f"largest |alpha| / L {max(map(abs, weights)):.3f} over {len(rows)} layers",
        holds=judge_figure_5(weights),
        criterion=Criterion(
            f"|alpha| / L is below {LARGEST_WEIGHT:g} in every layer of every seed",
            len({row["seed"] for row in rows}),
            AGREED,
        ),
        notes=(
            (
                "alpha = tanh(w), of either sign, zero at the start (ReZero); the paper's sigmoid"
                " starts at one half"
            ),
            (
                "|alpha| / L cannot reach 1 / L, which is 0.5 at two layers and 0.17 at the"
                " paper's six"
            ),
        ),
    )


def judge_figure_5(weights: Sequence[float]) -> bool:
    """Say whether every residual weight stays below a third."""
    return max(map(abs, weights)) < LARGEST_WEIGHT
