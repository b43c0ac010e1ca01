"""Sengupta et al. (2023), figure 6: activation factor and entropy against experts, layers and
dropout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from wellposed.charts import Panel, Row, Series, where
from wellposed.recipes.recipe import Criterion, Reproduction, Request
from wellposed_studies.runs import mean_and_error
from wellposed_studies.sengupta2023.measured import NEIGHBOURS_NOTE
from wellposed_studies.sengupta2023.states import measure_layers, probe_batches
from wellposed_studies.sengupta2023.studies import text_study
from wellposed_studies.sengupta2023.trained import (
    LABELS,
    SCALE_NOTE,
    Study,
    model_name,
    train_study,
    trained_model,
    tuned_study,
)
from wellposed_studies.verdicts import UNCERTAINTY, every, inside

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


def figure_6(request: Request) -> Reproduction:
    """Activation factor at the last layer and entropy against experts, layers and dropout."""
    study = text_study(request, "imdb")
    experts, layers, dropouts = request.pick(
        toy=((1, 2), (1, 2), (0.0, 0.3)),
        mini=((1, 4, 8), (1, 2, 4), (0.0, 0.2, 0.4)),
        medium=((1, 4, 8), (1, 2, 4), (0.0, 0.2, 0.4)),
        paper=((1, 2, 4, 8), (2, 4, 6), (0.0, 0.1, 0.2, 0.4)),
    )
    unscaled = replace(study, scale_embeddings=False)
    grid = [
        (unscaled, "transject", "experts", experts),
        (unscaled, "transject", "layers", layers),
        *((of, "post_ln", "layers", layers) for of in (unscaled, study)),
        *((of, "post_ln", "dropout", dropouts) for of in (unscaled, study)),
    ]
    rows: list[dict[str, Any]] = []
    change: dict[tuple[str, str], tuple[float, float]] = {}
    task, _ = train_study(request, unscaled, variants=("transject",), seeds=())
    for of, variant, option, values in grid:
        kept = tuned_study(request, of, task, (variant,))
        model = model_name(variant, scaled=of.scale_embeddings)
        mine = [_configured(request, kept, task, variant, **{option: value}) for value in values]
        rows += mine
        trained = [row for row in mine if row["trained"]]
        change[model, option] = _change(trained)
    return Reproduction(
        rows,
        [
            _panel(rows, variant, option, quantity)
            for quantity in _QUANTITIES
            for variant, option in _SWEPT
        ],
        got="change of the activation factor from the smallest to the largest value: "
        + ", ".join(
            f"{model}: {option} {value:+.2f} +- {error:.2f}"
            for (model, option), (value, error) in change.items()
        ),
        holds=judge_figure_6(change),
        notes=(NEIGHBOURS_NOTE, SCALE_NOTE, "dropout also on the embeddings"),
        criterion=Criterion(
            "from the smallest to the largest value tried and without scaled embeddings, experts"
            " raise the activation factor of TransJect, layers raise that of the Transformer by"
            " more than they change TransJect's, and dropout lowers the Transformer's",
            study.sizes.seeds,
            UNCERTAINTY,
        ),
    )


def _panel(rows: Sequence[Row], variant: str, option: str, quantity: str) -> Panel:
    """Return a quantity against an option, without and with scaled embeddings."""
    column, error = _QUANTITIES[quantity]
    series = []
    for name in dict.fromkeys(model_name(variant, scaled=scaled) for scaled in (False, True)):
        mine = [row for row in where(rows, model=name, option=option) if row["trained"]]
        errors = [row[error] for row in mine]
        values, points = [row["value"] for row in mine], [row[column] for row in mine]
        series.append(
            Series(name, values, points, errors=errors if all(map(math.isfinite, errors)) else ())
        )
    return Panel(f"{LABELS[variant]}: {option}", option, quantity, series)


def judge_figure_6(change: Mapping[tuple[str, str], tuple[float, float]]) -> bool | None:
    """Say whether experts, layers and dropout move the activation factor as the paper says."""
    deeper, deeper_error = change[LABELS["post_ln"], "layers"]
    ours, our_error = change[LABELS["transject"], "layers"]
    return every(
        (
            inside(*change[LABELS["transject"], "experts"], low=0),
            inside(deeper - abs(ours), math.hypot(deeper_error, our_error), low=0),
            inside(*change[LABELS["post_ln"], "dropout"], high=0),
        )
    )


def _configured(
    request: Request, study: Study, task: Any, variant: str, **changed: float
) -> dict[str, Any]:
    """Train one configuration of figure 6 with every seed and return its row: means, and the error
    of the factor."""
    ((option, value),) = changed.items()
    study = replace(
        study, name=f"{study.name}-{option}{value:g}", sizes=replace(study.sizes, **changed)
    )
    _, runs = train_study(request, study, variants=(variant,), task=task)
    batches = probe_batches(request, task)
    trained = [run for run in runs if run.metrics]
    found = [measure_layers(trained_model(run), batches) for run in trained]
    model = model_name(variant, scaled=study.scale_embeddings)
    row: dict[str, Any] = {
        "model": model,
        "option": option,
        "value": value,
        "trained": len(trained),
    }
    if not trained:
        return row
    factor, error = mean_and_error([layers.median_factor() for layers in found])
    entropy, entropy_error = mean_and_error([layers.entropy() for layers in found])
    return {
        **row,
        "activation_factor": factor,
        "standard_error": error,
        "entropy": entropy,
        "entropy_error": entropy_error,
        "entropy_standardized": fmean(layers.entropy(standardized=True) for layers in found),
        "accuracy": 100 * fmean(run.metric("accuracy,test") for run in trained),
    }


def _change(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return the factor at the largest value minus that at the smallest, and its standard error."""
    if len(rows) < 2:
        return math.nan, math.nan
    first, last = rows[0], rows[-1]
    error = math.hypot(first["standard_error"], last["standard_error"])
    return last["activation_factor"] - first["activation_factor"], error
