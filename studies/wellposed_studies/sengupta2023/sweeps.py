"""Sengupta et al. (2023): activation factor and entropy against experts, layers and dropout, and
models without one of their parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from wellposed.charts import Panel, Row, Series, where
from wellposed.recipes.recipe import Reproduction, Request, recipe
from wellposed_studies.sengupta2023.layers import FACTORS, NEIGHBOURS_NOTE
from wellposed_studies.sengupta2023.states import measure_layers, probe_batches
from wellposed_studies.sengupta2023.trained import (
    LABELS,
    ONE_EXPERT,
    ONE_HEAD,
    SCALE_NOTE,
    Study,
    text_study,
    train_study,
    tuned_study,
)
from wellposed_studies.study import FinishedRun, judged, mean_and_error, minus, said
from wellposed_studies.verdicts import agreed, every, inside, within

_SWEPT = (
    ("transject", "experts"),
    ("transject", "layers"),
    ("post_ln", "layers"),
    ("post_ln", "dropout"),
)
_QUANTITIES = {
    "median activation factor, last layer": ("activation_factor", "standard_error"),
    "entropy, mean of layers": ("entropy", "entropy_error"),
}
Change = tuple[float, float]
"""A difference and its standard error."""


@recipe(
    "sengupta2023/figure-6",
    measured={"mini": 27},
    estimated={"medium": 520},
    takes=("data",),
    power=FACTORS,
)
def figure_6(request: Request) -> Reproduction:
    """Activation factor and entropy against experts, layers and dropout (data: imdb).

    Claim: more experts raise the activation at the last layer; more layers raise it for
    Transformer and not for TransJect; more dropout lowers activation and entropy of Transformer

    Quote: "more experts in MOE increase activation at the final layer" (appendix C)

    Test: from the smallest to the largest value tried, experts raise the activation factor of
    TransJect, layers raise that of the Transformer by more than they change TransJect's, and
    dropout lowers the Transformer's; cannot be said where the scales of embeddings disagree

    Note: dropout also on the embeddings
    """
    study = text_study(request, "imdb")
    tried = {"experts": (1, 4, 8), "layers": (1, 2, 4), "dropout": (0.0, 0.2, 0.4)}
    if request.scale == "toy":
        tried = {"experts": (1, 2), "layers": (1, 2), "dropout": (0.0, 0.3)}
    unscaled = replace(study, scale_embeddings=False)
    rows: list[Row] = []
    runs: list[FinishedRun] = []
    change: dict[tuple[str, str], Change] = {}
    task, _ = train_study(request, unscaled, variants=("transject",), seeds=())
    for variant, option in _SWEPT:
        for of in (unscaled,) if variant == "transject" else (unscaled, study):
            kept = tuned_study(request, of, task, (variant,))
            mine = []
            for value in tried[option]:
                row, trained = _configured(request, kept, task, variant, option, value)
                mine.append(row)
                runs += trained
            rows += mine
            trained = [row for row in mine if row["trained"]]
            change[of.model_name(variant), option] = _change(trained)
    panels = [
        _panel(rows, variant, option, quantity, (unscaled, study))
        for quantity in _QUANTITIES
        for variant, option in _SWEPT
    ]
    texts = [
        f"{model}: {option} {value:+.2f} +- {error:.2f}"
        for (model, option), (value, error) in change.items()
    ]
    return judged(
        request,
        rows,
        panels,
        (
            "change of the activation factor from the smallest to the largest value:"
            f" {', '.join(texts)}"
        ),
        agreed([judge_figure_6(change, of.model_name("post_ln")) for of in study.scales()]),
        runs,
        notes=(NEIGHBOURS_NOTE, SCALE_NOTE),
    )


def _panel(
    rows: Sequence[Row], variant: str, option: str, quantity: str, studies: Sequence[Study]
) -> Panel:
    """Return a quantity against an option, without and with scaled embeddings."""
    column, error = _QUANTITIES[quantity]
    series = []
    for name in dict.fromkeys(study.model_name(variant) for study in studies):
        mine = [row for row in where(rows, model=name, option=option) if row["trained"]]
        errors = [row[error] for row in mine]
        values, points = [row["value"] for row in mine], [row[column] for row in mine]
        bars = errors if all(map(math.isfinite, errors)) else ()
        series.append(Series(name, values, points, errors=bars))
    return Panel(f"{LABELS[variant]}: {option}", option, quantity, series)


def judge_figure_6(change: Mapping[tuple[str, str], Change], plain: str) -> bool | None:
    """Say whether experts, layers and dropout move the activation factor as the paper says, of a
    Transformer by its name."""
    deeper, deeper_error = change[plain, "layers"]
    ours, our_error = change[LABELS["transject"], "layers"]
    return every(
        (
            inside(*change[LABELS["transject"], "experts"], low=0),
            inside(deeper - abs(ours), math.hypot(deeper_error, our_error), low=0),
            inside(*change[plain, "dropout"], high=0),
        )
    )


def _configured(
    request: Request, study: Study, task: Any, variant: str, option: str, value: float
) -> tuple[dict[str, Any], list[FinishedRun]]:
    """Train one configuration with every seed and return its row, means and errors, and its runs."""
    study = study.resized(f"{option}{value:g}", **{option: value})
    _, runs = train_study(request, study, variants=(variant,), task=task)
    batches = probe_batches(request, task)
    trained = [run for run in runs if run.metrics]
    found = [measure_layers(run.model, batches) for run in trained]
    row: dict[str, Any] = {"model": study.model_name(variant), "option": option, "value": value}
    row["trained"] = len(trained)
    if trained:
        factors = mean_and_error([layers.median_factor() for layers in found])
        row["activation_factor"], row["standard_error"] = factors
        entropies = mean_and_error([layers.entropy() for layers in found])
        row["entropy"], row["entropy_error"] = entropies
        row["entropy_standardized"] = fmean(of.entropy(standardized=True) for of in found)
        row["accuracy"] = 100 * fmean(run.metric("accuracy,test") for run in trained)
    return row, runs


def _change(rows: Sequence[dict[str, Any]]) -> Change:
    """Return the factor at the largest value minus that at the smallest, and its standard error."""
    if len(rows) < 2:
        return math.nan, math.nan
    first, last = rows[0], rows[-1]
    error = math.hypot(first["standard_error"], last["standard_error"])
    return last["activation_factor"] - first["activation_factor"], error


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

    def row(self) -> Row:
        """Return the row of a table."""
        row: dict[str, Any] = {"task": "imdb", "model": self.model, "split": self.split}
        row["ours"], row["standard_error"] = mean_and_error(self.scores)
        row["change"], row["change_error"] = mean_and_error(self.changes)
        seeds = " ".join(f"{value:.2f}" for value in self.scores)
        return {**row, "paper_change": self.printed, "seeds": seeds}

    def words(self) -> str:
        """Return the change in words beside that which the paper prints."""
        verdict = {True: "a loss", False: "no loss", None: "cannot be said"}[self.loses]
        points = f"{said(self.changes)} points, paper {self.printed:g}"
        return f"; {self.model} ({self.split}) {points}: {verdict}"


def ablations(request: Request, study: Study) -> list[Ablation]:
    """Return the Transformer with one head and TransJect with one expert on IMDb, trained at the
    rate of the whole model; none on another task."""
    if study.name != "imdb":
        return []
    found = []
    for variant, option, split, printed in (
        ("post_ln", "heads", "test", ONE_HEAD),
        ("transject", "experts", "valid", ONE_EXPERT),
    ):
        task, whole = train_study(request, study, variants=(variant,))
        changed = tuned_study(request, study, task, (variant,)).resized(f"{option}1", **{option: 1})
        _, runs = train_study(request, changed, variants=(variant,), task=task)
        scores, before = (
            [100 * run.metric(f"accuracy,{split}") for run in of] for of in (runs, whole)
        )
        label = f"{LABELS[variant]}, one {option[:-1]}"
        found.append(Ablation(label, split, printed, scores, minus(scores, before)))
    return found
