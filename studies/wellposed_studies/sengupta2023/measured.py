"""Sengupta et al. (2023): what figures 3 to 7 share: their studies, what is measured, boxes; see
`states`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from wellposed.charts import Row, Series
from wellposed.errors import ConfigError
from wellposed.recipes.recipe import Request
from wellposed_studies.runs import mean_and_error
from wellposed_studies.sengupta2023.states import Layers, measure_layers, probe_batches
from wellposed_studies.sengupta2023.studies import arena_study, text_study
from wellposed_studies.sengupta2023.trained import Study, model_name, train_study, trained_model

NEIGHBOURS_NOTE = (
    "entropies in nats by the three nearest neighbours; the paper names no estimator; entropy"
    " depends on scale"
)


def figure_studies(request: Request) -> list[Study]:
    """Return IMDb and its characters, which figures 3a, 5 and 7 look at."""
    return [text_study(request, "imdb"), arena_study(request, "text")]


def measure_study(
    request: Request, study: Study, variants: Sequence[str]
) -> dict[str, list[tuple[Layers, float]]]:
    """Train a study and return, for each model, what was measured and the test accuracy, seed by
    seed."""
    task, runs = train_study(request, study, variants=variants)
    batches = probe_batches(request, task)
    found: dict[str, list[tuple[Layers, float]]] = {}
    for run in runs:
        if run.metrics:
            measured = measure_layers(trained_model(run), batches)
            model = model_name(run.variant, scaled=study.scale_embeddings)
            found.setdefault(model, []).append((measured, 100 * run.metric("accuracy,test")))
    missing = {
        model_name(variant, scaled=study.scale_embeddings) for variant in variants
    }.difference(found)
    if missing:
        raise ConfigError(f"{study.name}: training diverged for {', '.join(sorted(missing))}")
    return found


def box_series(label: str, rows: Sequence[Row]) -> Series:
    """Return a box a layer: median, quartiles and extremes; layers where any of these is infinite
    have none."""
    names = ("median", "lower_quartile", "upper_quartile", "least", "greatest")
    drawn = [row for row in rows if all(math.isfinite(row[name]) for name in names)]
    median, lower, upper, least, greatest = ([row[name] for row in drawn] for name in names)
    return Series(
        label,
        [row["layer"] for row in drawn],
        median,
        "boxes",
        band=(lower, upper),
        whiskers=(least, greatest),
    )


def mean_or_infinite(values: Sequence[float]) -> tuple[float, float | None]:
    """Return mean and standard error, None in place of an error that is not finite."""
    mean, error = mean_and_error(values)
    return mean, error if math.isfinite(error) else None


def printed_line(
    label: str, height: float, layers: Sequence[float], colour: int | None = None
) -> Series:
    """Return a number of the paper as a dashed line over the layers."""
    return Series(f"paper, {label}", [min(layers), max(layers)], [height, height], "dashed", colour)
